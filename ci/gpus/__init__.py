"""What several GPUs show; docs/gpu.md says how to run it."""
