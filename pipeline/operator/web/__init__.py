"""The web page: the runs of one folder, live in a browser.

One process (``headrace run dashboard``) serves it. It reads what every command reads, and changes runs
through the same functions as ``headrace scale``. Scripts and styles are files of this package.

    serving    the listening socket and the server's lifetime
    app        addresses and answers
    guard      checks host, token and origin of requests; adds headers to answers
    reader     one reader for each run that a page shows, shared by all pages
    figures    data from a run's files: history, samples, logs
    views      data from a run's ledger and fleet"""
