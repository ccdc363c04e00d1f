"""Recorder: the ops of a real process - CUDA streams and NCCL, or gloo on CPUs - as a trace.

    recording.py    record: one process of a real run, from begin to trace
    process.py      the machine of a real process: nothing decides, nobody parks
    mode.py         dispatch: operators and collectives of the process become ops, and then run
    works.py        handles of real operations: whose wait orders the current stream after what
    cpu.py          streams on CPUs, where PyTorch's do nothing
    cuda.py         streams, events and memory of CUDA

Each op is what the simulator makes of the same call, by the same code; the recorder adds no wait.
"""

from fsdp_sim.recorder.recording import Recording, record

__all__ = ["Recording", "record"]
