"""Everything that turns text into token ids and back. Device only."""
