"""Run by the interpreter that vLLM is installed in: logits of transformers for tokens that an engine has sampled.

python vllm_reference.py FILE.json: [{"directory", "rows": [[prompt token ids, completion token ids], …]}, …]; the same
file gets, per row and completion token, how far the likeliest token's logprob lies above its own, and its own.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(2)


@torch.no_grad()
def answer(model, prompt, completion):
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double()
    logprobs = logits.log_softmax(-1)
    own = logprobs[torch.arange(len(completion)), torch.tensor(completion)]
    return [(logprobs.max(-1).values - own).tolist(), own.tolist()]


file = Path(sys.argv[1])
answers = []
for job in json.loads(file.read_text()):
    model = AutoModelForCausalLM.from_pretrained(
        job["directory"], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers.append([answer(model, *row) for row in job["rows"]])
file.write_text(json.dumps(answers))
