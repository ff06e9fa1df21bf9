"""No PyTorch at all: its globals, arguments, input and streams are those of any script."""

import sys

print(sorted(k for k in globals() if k.startswith("__")))
print(__name__, __file__, __package__, __spec__, type(__loader__).__name__, __builtins__.__name__)
print(sys.argv, sys.path[0] == __file__.rpartition("/")[0], "torch" in sys.modules, "numpy" in sys.modules)
print(sys.modules["__main__"].__dict__ is globals(), __doc__[:10])
for line in sys.stdin:
    print("read", line.rstrip())
print("grüße, 世界 ✓", end="")
sys.stderr.write("on stderr\n")
