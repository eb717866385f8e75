"""Models of timm, by load_level."""

import subprocess
import sys
from pathlib import Path


def test_a_level_of_a_timm_model(tmp_path: Path) -> None:
    script = Path(__file__).with_name("timm_level.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["resnet10t", "vit_tiny_patch16_224", "test_resnet"]
