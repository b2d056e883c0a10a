"""The vLLM generation engine, behind the same Protocol as the local one.

Its modules:

    engine      windows, segments, endings, parity: knows no vLLM, drives a *core*
    core        the Protocol through which the engine uses vLLM
    in_process  a core on LLMEngine in this process: for CPUs
    background  a core on AsyncLLM, whose processes decode on their own: for GPUs
    journal     log-probs kept where they are sampled, for a core in the same process
    staging     copies weights to a device while decoding continues
    worker      runs inside vLLM's own workers: weights, and tokens drawn from the trajectory's stream
    processes   runs first inside vLLM's processes: their end with their parent, phases of their start
    starting_worker  vLLM's worker, which tells these phases
    arguments   from a run's configuration to vLLM's arguments"""
