"""Both papers run again: a section per table or figure, each with what the paper says and what was found here."""
