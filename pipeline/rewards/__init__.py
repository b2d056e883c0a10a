"""Verifiers and reward shaping: from finished responses to scores.

README.md has how to write a verifier and check it before training.

    verifier.py       the nouns: Response in, Verdict or VerifierFailure out
    registry.py       names -> import paths
    arithmetic.py     exact numbers            (in process)
    dapo_math.py      DAPO's rule-based check  (in process)
    equivalence.py    mathematics              (in a sandbox)
    final_answer.py   what a response commits itself to, for it
    signature.py      how a verifier is called: ours, TRL's, verl's
    sandbox.py        the child process that runs what may raise, hang or grow
    process.py        its parent's end
    pool.py           the engine: batches in, outcomes out
    shaping.py        verdict -> reward (correct, wrong, over-long)
    offline.py        the same engine on a file of responses
    distribution.py   what offline scoring counts; cli.py prints it as ``headrace score``
"""
