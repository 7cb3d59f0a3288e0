"""What measured the figures of README and docs/: a command in each folder."""

import os

# Before TensorFlow is imported: its notes would drown what commands print.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
