"""The smallest real model on a plain CPU: that default settings bear work whose steps take minutes.

material  seed -> model, tokenizer, prompts
verifier  about half of all responses are right
blame     incidents of the run, and whether they blamed a healthy worker
__main__  the run, alone, beside neighbours, and interrupted; what it took"""
