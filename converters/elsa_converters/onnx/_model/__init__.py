"""Read ONNX models without their weights, and write them with their weights."""
