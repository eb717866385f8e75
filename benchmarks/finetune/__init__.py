"""What a short fine-tune makes of packed levels: `python -m benchmarks.finetune`."""

from pathlib import Path

RUNS = Path("runs/finetune")
"""Files, states, and what was measured."""
LEVELS = "90,80,70,50"
