"""Examples, one folder a task: `python -m examples.demo`, `examples.few_shot`, ..."""
