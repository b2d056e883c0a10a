"""The documentation site: its pages, those that are generated, and the build.

``nav`` lists the pages. ``links`` finds and rewrites their links. ``generated`` makes text from the
schema, the commands and the rules. ``site`` puts all into one folder, for Sphinx."""
