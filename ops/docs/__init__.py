"""The documentation site: ``nav`` lists its pages, ``generated`` makes text from the schema, the commands and the
rules, ``site`` writes the sources, and Sphinx (``conf``) builds it."""
