"""The web page: the runs of one folder, live in a browser.

One process (``headrace run dashboard``) serves it. It reads what every command reads, and changes runs
through the same functions as ``headrace scale``. Scripts, styles and what is read from a
run's files are in ``pipeline.observability.page``, which also makes the report.

    serving    the listening socket and the server's lifetime
    app        addresses and answers
    guard      checks host, token and origin of requests; adds headers to answers
    reader     one reader for each run that a page shows, shared by all pages
    views      data from a run's ledger and fleet"""
