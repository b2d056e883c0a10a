"""The cost of looking: views of a full ledger, and what the counts behind them add to its work.

``load`` fills a ledger with 200 generators and 100,000 trajectories in every state. ``path`` takes
groups from lease to settlement, for this source tree or an earlier one. ``python -m ops.bench.views
--help`` lists the options."""
