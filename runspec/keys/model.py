"""The keys of the model, its adapters, its tokenizer and its folder."""

from dataclasses import dataclass
from typing import Any

from runspec.keys.key import REQUIRED, Key, changeable, setting

# model._component_ of a model that its folder's config.json names: transformers has the code.
TRANSFORMERS = "transformers"
# The tokenizer of the model's folder.
FOLDERS_TOKENIZER = {
    "_component_": "trainer.data.tokenizers.hugging_face_tokenizer",
    "path": "${checkpointer.checkpoint_dir}",
}


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """Model."""

    model: dict[str, Any] = setting(
        "open block",
        "The model and its adapters. Without _component_ (or with transformers) the config.json "
        "in checkpointer.checkpoint_dir defines the model, and model.lora_rank trains adapters. "
        "A torchtune builder is read as this: its lora_* as LoRA on the folder's model.",
        {"_component_": TRANSFORMERS},
        inner=(
            Key("_component_", "text", "transformers, or a builder's dotted path.", TRANSFORMERS),
            Key(
                "adapter",
                "text",
                "What is trained instead of all weights: lora, dora, ia3, prompt, prefix, or the "
                "dotted path of an adapter of your own. Default: lora if lora_rank is set.",
            ),
            Key(
                "lora_modules",
                "texts",
                "What gets LoRA, by the last part of its name: linear layers, such as q_proj, and "
                "lm_head. Default: all linear layers of the blocks.",
            ),
            Key(
                "lora_rank",
                "positive",
                "LoRA rank: a higher rank learns more and needs more memory. Default: no LoRA.",
            ),
            Key(
                "lora_alpha",
                "number",
                "LoRA updates are scaled by lora_alpha / lora_rank. Default: twice the rank.",
            ),
            Key("lora_dropout", "rate", "Dropout on the input of LoRA layers.", 0.0),
            Key(
                "modules_to_save",
                "texts",
                "Layers to train in full, in addition to the adapter: embed_tokens, lm_head.",
            ),
            Key(
                "use_rslora",
                "flag",
                "rsLoRA: updates are scaled by lora_alpha / sqrt(lora_rank), for high ranks.",
                False,
            ),
            Key(
                "num_virtual_tokens",
                "positive",
                "Virtual tokens before each document, for adapter: prompt and prefix. Default: 20.",
            ),
            Key(
                "prompt_init_text",
                "text",
                "The text that a prompt (by its embeddings) or a prefix (by the base model's keys "
                "and values) begins as, such as the task in one sentence; repeated or cut to "
                "num_virtual_tokens. Default: a general instruction.",
            ),
            Key(
                "target_modules",
                "texts",
                "Linear layers that get (IA)3, by the last part of their names. Default: as PEFT, "
                "k_proj, v_proj and the last layer of the MLP; q_proj instead of k_proj for Qwen "
                "and Gemma.",
            ),
            Key(
                "quantize_base",
                "flag",
                "Keep the frozen base in 4 bits (NF4).",
                False,
            ),
        ),
    )
    tokenizer: dict[str, Any] = setting(
        "component",
        "Builder of the tokenizer, with its chat template.",
        REQUIRED,
        inner=(
            Key("path", "text", "Folder or file of the tokenizer."),
            Key(
                "chat_template",
                "any",
                "A chat template in the place of the folder's: its file, or its text.",
            ),
            Key(
                "chat_template_kwargs",
                "open block",
                "Arguments of the chat template, such as {enable_thinking: false}.",
            ),
            Key(
                "new_tokens",
                "any",
                "Tokens to add to the vocabulary: a list of texts, or a file with one per line. "
                "Embedding and output head grow by their rows, which begin as the mean of the "
                "others.",
            ),
            Key(
                "max_seq_len",
                "positive",
                "Maximum sample length, or length of a packed row, in tokens. A longer sample "
                "is truncated; a plain text is split.",
            ),
        ),
    )
    checkpointer: dict[str, Any] = setting(
        "open block",
        "The model's folder.",
        REQUIRED,
        inner=(
            Key(
                "checkpoint_dir",
                "text",
                "Folder of config.json and weights.",
                REQUIRED,
                may_change=True,
            ),
            Key(
                "checkpoint_files",
                "any",
                "Weight files. Default: those that transformers reads.",
                may_change=True,
            ),
            Key(
                "model_type",
                "text",
                "torchtune's name of the model family: LLAMA3.",
                may_change=True,
            ),
            Key("adapter_checkpoint", "text", "Adapter to start from (safetensors)."),
            Key(
                "recipe_checkpoint",
                "text",
                "State of a torchtune run.",
                refused=(
                    "the trainer cannot read the state of a torchtune run; start from its "
                    "weights with checkpointer.checkpoint_dir, or from its adapter with "
                    "checkpointer.adapter_checkpoint"
                ),
            ),
            Key(
                "output_dir",
                "text",
                "Folder for checkpoints.",
                unused="checkpoints go to the run's directory",
            ),
        ),
    )
    first_blocks: int | None = setting(
        "positive",
        "Train only the first blocks of the model, this many, for rehearsals: cookbook doctor "
        "--rehearse.",
    )
    router_aux_loss_coef: float = setting(
        "rate", "Weight of the load-balancing loss of the experts.", 0.0
    )
    freeze: list[str] | None = setting(
        "texts",
        "Patterns of names of parameters that are not trained: model.layers.[0-9].*, or "
        "*.mlp.gate.* for the routers of experts.",
    )
    seed: int = setting("count", "Seed of the order of samples, of dropout and of new adapters.", 0)
    save_adapter_weights_only: bool = changeable(
        "flag", "Export the adapter, not the merged model.", False
    )
