"""Masks against what the templates really say: the supervised tokens decode to the replies and their end-of-turn tokens."""

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoder
from drafttrain.data.forms import conversation
from drafttrain.data.sources import Conversation

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CONTENT_ONLY = MARKED.replace(
    "m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n'", "m['content'] }}{% endgeneration %}{{ '<|im_end|>\n'"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' </s>' }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
LLAMA2_MARKED = LLAMA2.replace(
    "{{ ' ' + m['content'] + ' </s>' }}", "{% generation %}{{ m['content'] + ' </s>' }}{% endgeneration %}"
)
LATE_END = (  # the end of a reply is written by the turn behind it
    "{% for m in messages %}{% if m['role'] == 'user' %}{% if not loop.first %}{{ '</s>' }}{% endif %}"
    "{{ '[INST]' + m['content'] + '[/INST]' }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
COUNTING = (  # the header tells how many turns there are: every turn changes the text before it
    "{{ messages | length }} turns\n{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MERGES = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("h", "i"), ("e", "s"), ("Ġ", "y"), ("Ġy", "es")]


def byte_tokenizer(template: str | None, eos: str = "<|im_end|>", trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a handful of merges, two of them across blanks, so that prompt and reply can share a token."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, chat_template=template)


def chat(*contents: str, system: str | None = None) -> Conversation:
    """Contents alternate between user and assistant."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return Conversation("data.jsonl:1", tuple(([{"role": "system", "content": system}] if system else []) + turns))


def spans(conversation: Conversation, tokenizer: PreTrainedTokenizerFast, max_length: int = 10_000) -> list[str]:
    """The text of every run of supervised tokens."""
    encoded = Encoder(tokenizer, max_length)(conversation)
    runs, previous = [], False
    for token, supervised in zip(encoded.token_ids.tolist(), encoded.mask.tolist(), strict=True):
        if supervised:
            runs = runs if previous else [*runs, []]
            runs[-1].append(token)
        previous = supervised
    return [tokenizer.decode(run) for run in runs]


def test_encoder_chatml_supervises_replies_and_end_of_turn_tokens(subtests: pytest.Subtests) -> None:
    conversation = chat("hi", "yes, hi", "more?", "  def f():\n      return 1 ", system="be short")
    for template, trim_offsets in product((MARKED, MARKED_CONTENT_ONLY, CHATML), (False, True)):
        with subtests.test(template=template, trim_offsets=trim_offsets):
            tokenizer = byte_tokenizer(template, trim_offsets=trim_offsets)
            assert spans(conversation, tokenizer) == ["yes, hi<|im_end|>", "  def f():\n      return 1 <|im_end|>"]


def test_encoder_end_of_turn_other_than_eos_token_is_supervised() -> None:
    assert spans(chat("hi", "yes", "a", "b"), byte_tokenizer(CHATML, eos="</s>")) == ["yes<|im_end|>", "b<|im_end|>"]


def test_encoder_end_token_written_by_next_turn_belongs_to_reply() -> None:
    assert spans(chat("hi", "yes", "more?", "no"), byte_tokenizer(LATE_END, eos="</s>")) == ["yes</s>", "no"]


def test_encoder_generation_marks_give_same_loss_mask_as_prefixes() -> None:
    conversation = chat("hi", "yes\n", "\n", " hi\n\n")
    marked, plain = (Encoder(byte_tokenizer(t), 1000)(conversation) for t in (MARKED, CHATML))
    assert marked.token_ids.tolist() == plain.token_ids.tolist()
    assert marked.mask.tolist() == plain.mask.tolist()


def test_encoder_token_shared_by_prompt_and_reply_is_not_supervised() -> None:
    # "assistant\n" + "\n\nyes": the first two newlines are one token, which can never follow a prompt that ends in a newline
    for template in (CHATML, MARKED):
        assert spans(chat("hi", "\n\nyes"), byte_tokenizer(template)) == ["\nyes<|im_end|>"]


def test_encoder_end_of_text_quoted_in_reply_does_not_end_supervision() -> None:
    assert spans(chat("hi", "write </s> last"), byte_tokenizer(CHATML)) == ["write </s> last<|im_end|>"]


def test_encoder_leading_assistant_turn_is_not_supervised() -> None:
    messages = [{"role": "assistant", "content": "hello"}, *chat("hi", "yes").messages]
    assert spans(Conversation("x:1", tuple(messages)), byte_tokenizer(CHATML)) == ["yes<|im_end|>"]


def test_encoder_reply_not_to_be_learnt_is_not_supervised() -> None:
    """With generation marks and without; it stays in the text."""
    turns = [{"role": role, "content": said} for role, said in (("user", "hi"), ("assistant", "no"), ("user", "a"))]
    record = {"messages": [*turns[:1], turns[1] | {"weight": 0}, *turns[2:], {"role": "assistant", "content": "yes"}]}
    for template in (MARKED, MARKED_CONTENT_ONLY, CHATML):
        tokenizer, found = byte_tokenizer(template), conversation("x:1", record)
        assert spans(found, tokenizer) == ["yes<|im_end|>"]
        assert "assistant\nno<|im_end|>" in tokenizer.decode(Encoder(tokenizer, 1000)(found).token_ids)
    twice = MARKED.replace("{% generation %}", "{% generation %}{{ '' }}{% endgeneration %}{% generation %}")
    with pytest.raises(UserError, match="the template marks 4 parts of 2 replies"):
        Encoder(byte_tokenizer(twice), 1000)(found)


def test_encoder_segments_of_text_are_supervised_by_label() -> None:
    parts = [("<s>hi", False), (" yes</s>", True), ("hi", False), (" hi", True)]
    found = conversation("x:1", {"segments": [{"text": text, "label": label} for text, label in parts]})
    assert spans(found, byte_tokenizer(None)) == [" yes</s>", " hi"]
    assert byte_tokenizer(None).decode(Encoder(byte_tokenizer(None), 100)(found).token_ids) == "<s>hi yes</s>hi hi"


def test_encoder_token_ids_are_rows_as_they_are() -> None:
    found = conversation("x:1", {"input_ids": [9, 5, 6, 7, 8], "loss_mask": [1, 0, 1, 0, 1]})
    row, cut = (Encoder(byte_tokenizer(None), length, vocab_size=10)(found) for length in (5, 4))
    assert row.token_ids.tolist() == [9, 5, 6, 7, 8]
    assert row.mask.tolist() == [False, False, True, False, True]  # never the first, which nothing precedes
    assert (cut.token_ids.tolist(), cut.truncated) == ([9, 5, 6], True)
    with pytest.raises(UserError, match=r"^x:1: token 9 .* is none of the target's 9; remove it"):
        Encoder(byte_tokenizer(None), 5, vocab_size=9)(found)


text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=30)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(text, min_size=2, max_size=6), st.sampled_from([MARKED, CHATML]))
def test_encoder_random_texts_supervise_each_reply_up_to_leading_blanks(contents: list[str], template: str) -> None:
    contents = contents[: len(contents) // 2 * 2]
    tokenizer = byte_tokenizer(template)
    found = spans(chat(*contents), tokenizer)
    assert len(found) == len(contents) // 2
    for reply, supervised in zip(contents[1::2], found, strict=True):
        whole = tokenizer.decode(tokenizer(reply + "<|im_end|>")["input_ids"])
        # at most the blanks of the token that the reply shares with its prompt are missing
        assert whole.endswith(supervised)
        assert not whole.removesuffix(supervised).strip()


def test_encoder_plain_text_is_supervised_after_first_token() -> None:
    encoded = Encoder(byte_tokenizer(None), 100)(Conversation("x:1", text="hi yes"))
    assert encoded.mask.tolist() == [False] + [True] * (len(encoded.token_ids) - 1)
    assert encoded.supervised == len(encoded.token_ids) - 1


def test_encoder_plain_text_begins_with_tokenizers_own_first_token() -> None:
    tokenizer = byte_tokenizer(None)
    first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = first
    assert Encoder(tokenizer, 100)(Conversation("x:1", text="hi yes")).token_ids[0] == tokenizer.bos_token_id


def test_encoder_truncation_cuts_token_ids_and_loss_mask() -> None:
    tokenizer = byte_tokenizer(CHATML)
    whole, cut = (Encoder(tokenizer, n)(chat("hi", "yes and more")) for n in (1000, 20))
    assert cut.truncated
    assert not whole.truncated
    assert cut.token_ids.tolist() == whole.token_ids[:20].tolist()
    assert cut.mask.tolist() == whole.mask[:20].tolist()
    assert Encoder(tokenizer, 4)(chat("hi", "yes")).supervised == 0


def test_encoder_conversation_without_chat_template_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.jsonl:1: conversations need a chat template.* has none; use .*`text` records"):
        Encoder(byte_tokenizer(None), 100)(chat("hi", "yes"))


def test_encoder_template_rewriting_earlier_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.jsonl:1: .*cannot be masked reliably: turn 2 .*\{% generation %\}.*`text`"):
        Encoder(byte_tokenizer(COUNTING), 100)(chat("hi", "yes", "more?", "no"))


@pytest.mark.parametrize("template", [LLAMA2, LLAMA2_MARKED])
def test_encoder_conversation_refused_by_template_names_its_line(template: str) -> None:
    with pytest.raises(UserError, match=r"data.jsonl:1: the chat template refuses .*only user and assistant"):
        Encoder(byte_tokenizer(template), 100)(chat("hi", "yes", system="be short"))
