"""The container of safetensors, read strictly (spec §3): from bytes to a checked header."""
