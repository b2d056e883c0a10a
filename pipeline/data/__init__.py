"""Prompts: from files to a resumable stream, ``source.PromptSource``.

**The rule.** A fault of one line is reported with file and line, and the line is skipped. A fault
of a whole file or of the configuration is refused. Such faults are a missing file, a file that is
not Parquet, a verifier that does not exist, and no usable line at all."""
