"""TRL's SFTTrainer with a tiny model and a tokenizer of its own; nothing is downloaded."""

from datasets import Dataset
from proof import STEPS, prove
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

TEXT = "a quick brown fox jumps over the lazy dog"

words = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *TEXT.split()])}
raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=len(words), num_attention_heads=2, **shape)
args = SFTConfig(
    "out",
    max_steps=2 * STEPS,
    per_device_train_batch_size=2,
    bf16=False,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    max_length=32,
)
data = Dataset.from_dict({"text": [TEXT] * max(8, STEPS // 3)})
model = LlamaForCausalLM(config)
trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
trainer.train()
prove(args.process_index, args.world_size, trainer.model_wrapped)
