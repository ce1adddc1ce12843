"""A BERT's checkpoint, as Hugging Face writes it."""

import json

import numpy as np
import safetensors.numpy

SIZES = {
  "vocab_size": 19,
  "num_hidden_layers": 2,
  "hidden_size": 12,
  "num_attention_heads": 3,
  "intermediate_size": 20,
  "max_position_embeddings": 9,
  "type_vocab_size": 2,
  "layer_norm_eps": 1e-12,
}


def tensors(sizes=SIZES, pooler=True):
  """Returns the tensors, drawn, of a BERT of some sizes, by their names."""
  c, f = sizes["hidden_size"], sizes["intermediate_size"]
  tables = {
    "word": sizes["vocab_size"],
    "position": sizes["max_position_embeddings"],
    "token_type": sizes["type_vocab_size"],
  }
  maps, norms = {"pooler.dense": (c, c)} if pooler else {}, ["embeddings"]
  for i in range(sizes["num_hidden_layers"]):
    at = f"encoder.layer.{i}"
    norms += [f"{at}.attention.output", f"{at}.output"]
    for name in ("self.query", "self.key", "self.value", "output.dense"):
      maps[f"{at}.attention.{name}"] = c, c
    maps[f"{at}.intermediate.dense"] = f, c
    maps[f"{at}.output.dense"] = c, f
  shapes = {
    f"embeddings.{name}_embeddings.weight": (rows, c)
    for name, rows in tables.items()
  }
  of_norms = [(f"{name}.LayerNorm", (c,)) for name in norms]
  for name, shape in [*maps.items(), *of_norms]:
    shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(0, 0.5, shape).astype(np.float32)
    for name, shape in shapes.items()
  }


def write(folder, held=None, sizes=SIZES, **said):
  """Writes a checkpoint, of which a config says more; returns its folder."""
  folder.mkdir(parents=True, exist_ok=True)
  config = {"model_type": "bert", "hidden_act": "gelu", **sizes, **said}
  (folder / "config.json").write_text(json.dumps(config))
  held = tensors(sizes) if held is None else held
  safetensors.numpy.save_file(held, folder / "model.safetensors")
  return folder
