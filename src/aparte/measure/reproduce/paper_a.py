"""What paper A (arXiv 2602.16760) reports, for tables side by side.

Device RTX 3090, cloud A100 or RTX 4090; Mistral 7B Instruct v0.3 and Mistral NeMo 12B Instruct in float16,
greedy, cut 2,2. Its projections, scaling and device memory stand in the presets of ``aparte plan`` as far as
they follow from measurements; what it prints is here.
"""

from __future__ import annotations

MODELS = "Mistral 7B and NeMo 12B, RTX 3090 on the device, A100 on the cloud, 78 to 85 ms"

#: Tokens per second by transport, one improvement after the other.
TRANSPORT = {
    "HTTP, pickled tensors, base64": 1.4,
    "http": 3.9,
    "http_gpu": 5.3,
    "websocket": 7.8,
    "lookahead": 8.7,
    "local": 39.0,
}
#: One sequential step, ms, of the 7B and the 12B model.
LATENCY: dict[str, tuple[float, float]] = {
    "network": (77.4, 78.5),
    "device": (26.2, 24.4),
    "cloud": (15.9, 21.1),
    "codec": (1.0, 1.0),
    "total": (120.2, 124.7),
    "fixed": (42.9, 46.3),
}
#: Projected tok/s by round trip, ms: 7B sequential, 7B lookahead, 12B sequential, 12B lookahead.
PROJECTION: dict[int, tuple[float | None, ...]] = {
    5: (20.9, 23.9, None, 19.6),
    20: (15.9, 18.6, 15.1, 15.2),
    40: (12.1, 13.6, 11.6, 11.6),
    60: (9.7, 10.7, 9.4, 9.4),
    80: (8.1, 8.8, 7.9, 8.0),
    100: (7.0, 7.5, 6.8, 6.9),
    120: (6.1, 6.5, 6.0, 6.1),
    150: (5.2, 5.4, 5.1, 5.2),
}
PROJECTION_ERROR = "1.2 to 2.4 % sequential, 4.5 to 6.2 % with lookahead"
#: By n: tok/s, tokens per step, match rate; n = 0 is sequential.
NGRAM: dict[str, dict[int, tuple[float, float, float | None]]] = {
    "7B": {
        0: (8.3, 1.00, None),
        3: (9.3, 1.21, 0.144),
        4: (9.2, 1.23, 0.137),
        5: (8.9, 1.23, 0.134),
        6: (9.1, 1.25, 0.137),
        7: (8.3, 1.25, 0.132),
    },
    "12B": {
        0: (8.0, 1.00, None),
        3: (8.7, 1.21, 0.140),
        4: (8.5, 1.23, 0.134),
        5: (8.4, 1.25, 0.132),
        6: (8.1, 1.24, 0.126),
        7: (7.8, 1.24, 0.117),
    },
}
#: At n = 5 by category: tok/s and tokens per step of the 7B and of the 12B model.
CATEGORY: dict[str, tuple[float, float, float, float]] = {
    "code": (10.5, 1.43, 10.4, 1.57),
    "structured": (8.0, 1.20, 7.9, 1.23),
    "creative": (8.2, 1.12, 7.3, 1.06),
    "conversational": (8.8, 1.17, 8.0, 1.12),
}
BREAK_EVEN = "1.15 to 1.20"
PEAK = 7
JACOBI_TOK_S = 1.5
#: 4 prompts of 200 tokens, 7B and 12B.
IDENTITY = {
    "identical": ("4 of 4", "4 of 4"),
    "sequential": ("1.21", "1.18"),
    "lookahead": ("8.48", "13.29"),
    "logit_diff": ("29.0", "38.3"),
}
#: Round trips in ms and tok/s of providers.
PROVIDERS = {"direct": ("78–85 and 80–100", 10.9), "relayed": ("200–400", 1.2)}
#: Preset of ``aparte plan``: KB per token, cloud ms, round trip to compute, sequential tok/s, device GB.
SCALING: dict[str, tuple[str, str, str, str, str]] = {
    "mistral-7b": ("8", "16", "4.9", "8.3", "2.0"),
    "mistral-nemo-12b": ("10", "21", "3.8", "8.0", "4.9"),
    "llama-70b": ("16", "30–50", "1.6–2.7", "6–7", "about 9"),
    "llama-405b": ("32", "100–200", "0.4–0.8", "3–5", "20–36"),
}
#: Top-1 and top-5 of its MLP inverter by layers on the device before the middle.
INVERSION = {2: (0.588, 0.620), 4: (0.443, 0.498), 6: (0.448, 0.566), 8: (0.348, 0.462)}
