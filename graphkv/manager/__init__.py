"""Who holds which block: rows, lengths, shared content, retention, and what moves between tiers. No bytes here."""
