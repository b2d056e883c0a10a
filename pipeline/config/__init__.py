"""Settings: ``schema`` says what they are, ``load`` reads, merges and refuses them. The only door to pydantic."""
