"""The smallest real model on a plain CPU: that default settings bear work whose steps take minutes.

material  seed -> model, tokenizer, prompts
verifier  about half of all responses are right
blame     its incidents
__main__  the run, alone, beside neighbours, or interrupted"""
