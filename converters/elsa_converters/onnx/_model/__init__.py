"""ONNX models in files: read without their weights, written with them."""
