"""GPT-2 pretraining."""

import os

# Without this setting, torch prints 30 lines of C++ frames when a connection closes. torch reads the variable when it
# is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
