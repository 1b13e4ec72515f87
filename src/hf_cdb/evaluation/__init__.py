"""Quality beside speed: a model on its tasks at full depth and with cdb, in one run.

`python -m eval.run --config configs/tiny-ouro.yaml --output DIR`, or `hf-cdb eval` with the same arguments.
"""

from .records import RecordFile
from .tasks import Example, Task, load_task

__all__ = ["Example", "RecordFile", "Task", "load_task"]
