"""Prompts: from files to a resumable stream.

    files.py        rows of JSONL and Parquet files, streamed; an unreadable line is a row too, with its number
    lines.py        one row -> one prompt, or the reason why not
    tokenizer.py    tokenizer.json without torch: encode, chat template, decode
    permutation.py  the shuffled order of an epoch, as a function
    report.py       what was skipped, where and why
    source.py       PromptSource: position in the stream -> Prompt

**The rule.** A fault of one line is reported with file and line, and the line is skipped. A fault
of a whole file or of the configuration is refused. Such faults are a missing file, a file that is
not Parquet, a verifier that does not exist, and no usable line at all."""
