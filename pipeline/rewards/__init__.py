"""Verifiers and reward shaping: from finished responses to scores.

README.md has how to write a verifier and check it before training.

    verifier.py       the nouns: Response in, Verdict or VerifierFailure out
    registry.py       names -> import paths
    arithmetic.py     exact numbers            (in process)
    by_model.py       a reward model's score   (in process)
    dapo_math.py      DAPO's rule-based check  (in process)
    equivalence.py    mathematics              (in a sandbox)
    final_answer.py   a response's committed final answer, for it
    signature.py      how a verifier is called: ours, TRL's, verl's
    sandbox.py        the child process for verifiers that may raise, hang or grow
    process.py        its parent's end
    pool.py           the engine: batches in, outcomes out
    overlong.py       the soft over-long punishment
    shaping.py        verdict -> reward (correct, wrong, over-long)
"""
