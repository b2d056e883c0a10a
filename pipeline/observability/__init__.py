"""What a person or a program sees of a run: status, metrics, tables, live view, history, report,
``why``.
"""
