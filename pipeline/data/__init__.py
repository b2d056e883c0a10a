"""Prompts: from files to a resumable stream.

    files.py        rows of JSONL and Parquet files, streamed; what cannot be read is a row too, with its line
    lines.py        one row -> one prompt, or the reason why not
    tokenizer.py    tokenizer.json without torch: encode, chat template, decode
    permutation.py  the shuffled order of an epoch, as a function
    report.py       what was skipped, where and why
    source.py       PromptSource: position in the stream -> Prompt

**The rule.** What is wrong with one line is reported with file and line, and the line is skipped;
what is wrong with a whole file or with the configuration (missing file, not Parquet, a verifier
that does not exist, no usable line at all) is refused.
"""
