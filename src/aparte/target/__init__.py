"""Targets give logits for the nodes of a token tree: split over two machines, or whole on one."""
