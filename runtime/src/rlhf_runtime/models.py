"""Model folders: a path as it is, or a random model made on the spot."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_api import RuntimeConfig
from rlhf_api.roles import ModelSource, RandomModel
from rlhf_api.runtime_config import ModelRole

from rlhf_runtime.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"


def model_folder(config: RuntimeConfig, role: ModelRole) -> Path:
    """The Hugging Face folder of a role's model; a random one is made in the run folder.

    Raises:
        InputError: when it cannot be built.
    """
    try:
        return materialize(config.models.by_role[role], Path(config.run_dir) / "models")
    except InputError as error:
        raise InputError(f"models.{role}.{error}") from error


def materialize(source: ModelSource, cache: Path) -> Path:
    """The Hugging Face folder of a model.

    A random model is written below `cache` once; processes that ask at the same time get the same folder, and every
    machine that makes it gets the same weights.

    Raises:
        InputError: when the architecture or its config is not one that transformers can build.
    """
    if source.random is None:
        return Path(source.path or "")
    key = hashlib.sha256(source.random.model_dump_json().encode()).hexdigest()[:16]
    folder = cache / f"{source.random.architecture}-{key}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache, prefix=".making-"))
        try:
            _write_random_model(source.random, scratch)
            os.rename(scratch, folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write_random_model(model: RandomModel, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    tokenizer = ascii_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    try:
        config = AutoConfig.for_model(model.architecture, **{"vocab_size": len(tokenizer), **special, **model.config})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(model.seed)
            network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise InputError(
            f"random: got {model.architecture} with {model.config}; expected a causal language model that "
            f"transformers can build ({error}). Fix: correct `architecture` or `config`"
        ) from error
    disable_progress_bar()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ascii_tokenizer() -> "PreTrainedTokenizerFast":
    """One token a printable ASCII character or newline, with pad and end-of-sequence tokens; others are dropped.

    It is byte-level BPE without merges, so that classes which rebuild a tokenizer from its vocabulary agree with it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [byte_level.pre_tokenize_str(chr(code))[0][0] for code in (ord("\n"), *range(32, 127))]
    vocabulary = {text: index for index, text in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def stop_token_ids(folder: Path, tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's, and those that the model's `generation_config.json` adds."""
    path = folder / "generation_config.json"
    listed = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    more = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *more]))


def load_tokenizer(folder: Path, special: Sequence[str] = ("eos",)) -> "PreTrainedTokenizerFast":
    """The tokenizer of a model folder, as its own `tokenizer.json` says where there is one.

    Args:
        folder: The model folder.
        special: Kinds of tokens that it has to have.

    Raises:
        InputError: when there is none, or it has no such token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader = PreTrainedTokenizerFast if (folder / "tokenizer.json").exists() else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder}: got no usable tokenizer ({error}); expected tokenizer.json. Fix: save the tokenizer there"
        ) from error
    for kind in special:
        if getattr(tokenizer, f"{kind}_token_id") is None:
            raise InputError(
                f"{folder}/tokenizer_config.json: got no {kind} token; expected `{kind}_token`. "
                f"Fix: name one of the vocabulary there, such as the end-of-text token"
            )
    return tokenizer
