"""Asks an exported model one question, by transformers alone: python answer.py MODEL QUESTION"""

import logging
import sys

# transformers imports torchao if it is installed. Its kernels are not used here.
logging.getLogger("torchao").setLevel(logging.ERROR)
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

folder, question = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": question}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)
answer = model.generate(**prompt, max_new_tokens=96, do_sample=False)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
