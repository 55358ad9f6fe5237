"""Parts of the contract scoreboard (scripts/contract.py): data, evidence, page."""
