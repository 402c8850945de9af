"""The untrusted side: sessions, limits and the server. Never imports anything that handles text."""
