"""The web page: runs of one folder, live, for an operator with a browser.

One process serves it: ``headrace run dashboard``. It reads what every command reads, and changes a run
by the same functions as ``headrace scale``. Scripts and styles are files of this package.

    serving    the listening socket, the server's life
    app        addresses and answers
    guard      host, token and origin of requests; headers of answers
    reader     one reader for each run that a page shows, shared by all pages
    figures    a run's files as the page's figures: history, samples, logs
    picture    a run's ledger and fleet as the page's figures"""
