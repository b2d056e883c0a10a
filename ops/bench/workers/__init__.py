"""A thousand workers at one ledger server: what heartbeats, news and views cost it, and how many
tokens a second it carries.

Workers are emulated: their connections, heartbeats, subscriptions and reads are those of the
project's own classes, without engines and mailboxes."""
