"""A script for Hugging Face transformers, with two lines changed: where the model comes from.

python examples/hf_generate.py MODEL [CLOUD]
"""

import sys

from transformers import AutoTokenizer

from aparte.errors import AparteError
from aparte.hf import AparteForCausalLM


def main(model_name: str, *clouds: str) -> None:
    model = AparteForCausalLM.from_pretrained(model_name, cloud=clouds)
    tokenizer = AutoTokenizer.from_pretrained(model.aparte.blueprint.checkpoint.folder)

    inputs = tokenizer("The sky is blue because", return_tensors="pt").to(model.device)
    outputs = model.generate(inputs["input_ids"], max_new_tokens=24, do_sample=False)
    print(tokenizer.decode(outputs[0], skip_special_tokens=True))
    model.close()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except AparteError as error:
        sys.exit(f"Error: {error}")
