"""A prepared folder is whole, says what it holds, and is noticed when it is torn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.errors import UserError
from shardlab.train.data import Corpus, DataSource, parse_sources
from shardlab.train.data import prepare as preparing
from shardlab.train.data.documents import Document, Documents, Input
from shardlab.train.data.prepare import EncodedText, encode_in_memory, lost_text, prepare
from shardlab.train.data.prepared_folder import MANIFEST, Manifest, PreparedFolder
from shardlab.train.data.tokenizers import ByteTokenizer, HuggingFace, Tokenizer
from tests.support import tokenizer_files

TEXT = "To be, or not to be: that is the question.\n" * 50


@pytest.fixture
def text(tmp_path: Path) -> Input:
    (tmp_path / "a.txt").write_text(TEXT)
    return Input(tmp_path / "a.txt", "text")


def lines_of(path: Path, texts: list[str]) -> Input:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Input(path, "jsonl")


def text_of(prepared: PreparedFolder) -> bytes:
    return b"".join(prepared.tokenizer().decode(np.asarray(prepared.run(p).tokens)) for p in ("training", "validation"))


def test_a_text_comes_back_from_its_folder_alone(text: Input, tmp_path: Path) -> None:
    for name, bpe in (("chars", None), ("bytes", None), ("bytes", 270)):
        folder = prepare([text], tmp_path / f"{name}{bpe}", name, bpe)
        shutil.move(folder.folder, tmp_path / "moved")
        moved = PreparedFolder.open(tmp_path / "moved")
        moved.verify()
        assert text_of(moved) == TEXT.encode()
        shutil.rmtree(tmp_path / "moved")


def test_the_split_is_that_of_nanogpt(text: Input, tmp_path: Path) -> None:
    """Its first int(0.9 * characters), for any text of one document."""
    manifest = prepare([text], tmp_path / "out", "chars").manifest
    assert manifest.training.tokens == int(0.9 * len(TEXT))
    assert manifest.training.tokens + manifest.validation.tokens == len(TEXT)
    assert manifest.vocab_size == len(set(TEXT))


@pytest.mark.parametrize(("characters", "dtype"), [(256, "uint8"), (257, "uint16"), (65_537, "uint32")])
def test_tokens_have_as_few_bytes_as_the_vocabulary_allows(characters: int, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(map(chr, range(0x10000, 0x10000 + characters))))
    folder = prepare([Input(tmp_path / "a.txt", "text")], tmp_path / "out", "chars")
    assert folder.manifest.dtype == dtype
    tokens = np.concatenate([folder.run("training").tokens, folder.run("validation").tokens])
    assert tokens.tolist() == list(range(characters))


def test_documents_begin_where_the_manifest_says_and_are_not_split(tmp_path: Path) -> None:
    texts = [f"{number}" * (5 + number) for number in range(9)]
    folder = prepare([lines_of(tmp_path / "a.jsonl", [*texts, ""])], tmp_path / "out", validation=0.25)
    sizes = [len(text) for text in texts]
    ends = np.cumsum(sizes).tolist()
    cut = folder.manifest.training.tokens
    assert cut in ends
    assert folder.run("training").starts.tolist() == [end for end in ends if end < cut]
    assert folder.run("validation").starts.tolist() == [end - cut for end in ends if cut < end < ends[-1]]
    assert folder.manifest.training.documents + folder.manifest.validation.documents == len(texts)


def test_documents_end_with_the_tokenizers_own_token(tmp_path: Path) -> None:
    folder = prepare([lines_of(tmp_path / "a.jsonl", ["aa", "bb", "cc", "dd"])], tmp_path / "out", train_bpe=257)
    end = folder.manifest.end
    run = folder.run("training")
    assert [int(run.tokens[start - 1]) for start in run.starts] == [end] * len(run.starts)
    assert text_of(folder) == b"aa<|endoftext|>bb<|endoftext|>cc<|endoftext|>dd<|endoftext|>"


def test_many_small_documents_and_several_files_are_read_in_order(tmp_path: Path) -> None:
    texts = [str(number) for number in range(3000)]
    inputs = [lines_of(tmp_path / "a.jsonl", texts[:2000]), lines_of(tmp_path / "b.jsonl", texts[2000:])]
    folder = prepare(inputs, tmp_path / "out", "chars")
    assert text_of(folder) == "".join(texts).encode()
    assert folder.manifest.sources == ("a.jsonl", "b.jsonl")


def test_progress_reaches_the_whole_input(tmp_path: Path) -> None:
    inputs = [lines_of(tmp_path / f"{name}.jsonl", ["abc"] * 5) for name in "ab"]
    said: list[tuple[str, int]] = []
    prepare(inputs, tmp_path / "out", "chars", progress=lambda doing, done: said.append((doing, done)))
    total = sum(source.size for source in inputs)
    assert {("vocabulary", total), ("tokens", total)} <= set(said)


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, OSError(28, "No space left on device"), UserError("no")])
def test_an_interrupted_preparation_leaves_nothing(
    stopped: BaseException, text: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise stopped

    monkeypatch.setattr(preparing, "_split", stop)
    with pytest.raises((KeyboardInterrupt, UserError)):
        prepare([text], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


PREPARING = """
import sys, time
from pathlib import Path
from shardlab.train.data.documents import Input
from shardlab.train.data.prepare import prepare

def wait(doing, done):
    print(doing, flush=True)
    time.sleep(100000)

prepare([Input(Path("a.txt"), "text")], Path("out"), progress=wait)
"""


def test_leftovers_of_killed_processes_are_removed_and_folders_in_use_stay(text: Input, tmp_path: Path) -> None:
    def parts() -> list[Path]:
        return sorted(tmp_path.glob("out.part-*"))

    command = [sys.executable, "-c", PREPARING]
    running = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) for _ in range(2)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == b"tokens\n"
    try:
        assert len(parts()) == 2
        running[0].kill()
        running[0].wait()
        assert len(parts()) == 2
        (tmp_path / "outer.part-1").mkdir()
        prepare([text], tmp_path / "out")
        (left,) = parts()
        assert running[1].poll() is None
    finally:
        for process in running:
            process.kill()
            process.communicate()
    shutil.rmtree(tmp_path / "out")
    prepare([text], tmp_path / "out")
    assert not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out", "outer.part-1"]


def test_a_folder_that_is_there_is_refused_and_left_alone(text: Input, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out exists; name a new folder"):
        prepare([text], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("", "the input is empty"), ("a", "the input has 1 token, but a token and the next one are needed")],
)
def test_an_input_without_tokens_is_refused(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    for tokenizer in ("bytes", "chars"):
        with pytest.raises(UserError, match=sentence):
            prepare([Input(tmp_path / "a.txt", "text")], tmp_path / "out", tokenizer)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("validation", [0.0, 1.0, -1.0, float("nan")])
def test_a_part_that_cannot_be_is_refused(validation: float, text: Input, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--validation .*give a share of the tokens between 0 and 1"):
        prepare([text], tmp_path / "out", validation=validation)


def test_a_text_that_is_not_utf8_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    for tokenizer in ({"tokenizer": "chars"}, {"train_bpe": 300}):
        with pytest.raises(UserError, match=r"a\.txt: the text is not UTF-8"):
            prepare([Input(tmp_path / "a.txt", "text")], tmp_path / "out", **tokenizer)  # pyright: ignore


def test_an_unknown_tokenizer_is_refused_with_the_nearest(text: Input, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer 'char'; did you mean chars\?"):
        prepare([text], tmp_path / "out", "char")
    with pytest.raises(UserError, match="--train-bpe 10: every byte"):
        prepare([text], tmp_path / "out", train_bpe=10)


def test_a_torn_file_is_refused_by_its_size_or_its_checksum(text: Input, tmp_path: Path) -> None:
    prepared = prepare([text], tmp_path / "out", "chars")
    path = prepared.folder / "training.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"training.bin has 1,934 bytes, not 1,935: the data are incomplete"):
        PreparedFolder.open(prepared.folder)
    path.write_bytes(whole[:-1] + b"\1")
    with pytest.raises(UserError, match=r"training.bin has another checksum than its manifest says"):
        Corpus.open([DataSource(prepared.folder)], 8, verify=True)
    path.unlink()
    with pytest.raises(UserError, match=r"training.bin is missing"):
        PreparedFolder.open(prepared.folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is not JSON"),
        ("{}", "has format None, not shardlab data 1; prepare the data again"),
        ("[]", r"is \[\]; give a table"),
        ('{"format": "shardlab data 1"}', "does not say sources, tokenizer"),
        ('{"format": "another"}', "has format 'another', not shardlab data 1; prepare the data again"),
    ],
)
def test_a_manifest_that_is_none_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(UserError, match=rf"manifest.json {reason}"):
        Manifest.read(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name a folder that shardlab data prepare has made"):
        Corpus.open([DataSource(tmp_path)], 8)


def test_a_sequence_longer_than_the_data_is_refused(text: Input, tmp_path: Path) -> None:
    prepared = prepare([text], tmp_path / "out")
    with pytest.raises(UserError, match=r"out has 215 tokens for validation but 301 are needed"):
        Corpus.open([DataSource(prepared.folder)], 300)


def test_documents_of_one_token_each_teach_nothing(tmp_path: Path) -> None:
    prepared = prepare([lines_of(tmp_path / "a.jsonl", list("abcdefghij" * 4))], tmp_path / "out")
    with pytest.raises(UserError, match="every document for training has one token"):
        Corpus.open([DataSource(prepared.folder)], 2)


def test_a_model_must_know_all_tokens(text: Input, tmp_path: Path) -> None:
    corpus = Corpus.open([DataSource(prepare([text], tmp_path / "out", "bytes").folder)], 8)
    corpus.require_vocabulary(256)
    corpus.require_vocabulary(ord("u") + 1)  # the largest that occurs
    with pytest.raises(UserError, match=r"tokens go up to 117 \(bytes\), .* vocabulary is 65; give --vocab-size 256"):
        corpus.require_vocabulary(65)
    with pytest.raises(UserError, match=r"vocabulary is 65; leave that token out, for hf has no row for it"):
        corpus.require_vocabulary(65, "hf")


def test_sources_must_have_one_tokenizer(text: Input, tmp_path: Path) -> None:
    a, b = (prepare([text], tmp_path / name, name).folder for name in ("chars", "bytes"))
    with pytest.raises(UserError, match=r"bytes has another tokenizer \(bytes, 256 tokens\) than .*chars \(chars, 18"):
        Corpus.open(parse_sources([f"{a}:0.5", f"{b}:0.5"]), 8)
    mixed = Corpus.open(parse_sources([f"{b}:0.5", f"{text.path}:0.5"]), 8)  # a file is its bytes
    assert [row["share"] for row in mixed.record()] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("a.txt:much", "'much' is no weight; give PATH:NUMBER"),
        ("a.txt:0", "the weight 0 is not allowed"),
        ("a.txt:-1", "the weight -1 is not allowed"),
        ("a.txt:nan", "the weight nan is not allowed"),
        ("nowhere:0.5", "nowhere does not exist"),
    ],
)
@pytest.mark.usefixtures("text")
def test_a_source_that_cannot_be_is_refused(
    word: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        parse_sources([word])


def test_a_weight_of_next_to_nothing_is_refused(text: Input) -> None:
    with pytest.raises(UserError, match=r"a weight of 1e-05 is less than a part in 1000"):
        Corpus.open([DataSource(text.path), DataSource(text.path, 1e-5)], 8)


def test_a_table_of_paths_and_weights_is_the_same_as_words(text: Input) -> None:
    assert parse_sources({str(text.path): 0.7}) == parse_sources([f"{text.path}:0.7"])


def test_bytes_of_each_document_s_text_are_kept(tmp_path: Path) -> None:
    """Also where a document is cut in two, in which a character may be."""
    texts = ["ä" * 40, "b", "€" * 30]
    folder = prepare([lines_of(tmp_path / "a.jsonl", texts)], tmp_path / "out", train_bpe=257, validation=0.2)
    sizes = [folder.run(part).sizes for part in ("training", "validation")]
    assert sum(int(part_sizes.sum()) for part_sizes in sizes if part_sizes is not None) == sum(
        len(text.encode()) for text in texts
    )
    cut = folder.run("validation").sizes
    assert cut is not None
    assert cut.tolist() == [folder.manifest.validation.tokens - 1], "a token is a byte, and the end of a document none"


def test_a_folder_without_sizes_is_read_as_before(text: Input, tmp_path: Path) -> None:
    prepared = prepare([text], tmp_path / "out")
    manifest = json.loads((prepared.folder / MANIFEST).read_text())
    for name in ("training.sizes.bin", "validation.sizes.bin"):
        (prepared.folder / name).unlink()
        del manifest["files"][name]
    del manifest["largest"], manifest["lost"]
    (prepared.folder / MANIFEST).write_text(json.dumps(manifest))
    run = PreparedFolder.open(prepared.folder).run("training")
    assert run.sizes is None
    assert run.largest == ord("u")


def test_dropped_characters_are_recorded(tmp_path: Path) -> None:
    tokenizer_files.dropping("abcdefgh .").save(str(tmp_path / "tokenizer.json"))
    lines = lines_of(tmp_path / "a.jsonl", ["a bad ö.", "öß", "a bed", "a cab"] * 3)
    folder = prepare([lines], tmp_path / "out", str(tmp_path / "tokenizer.json"))
    assert folder.manifest.lost == {"ö": 6, "ß": 3}


def test_a_text_of_which_nothing_is_left_is_refused_with_the_reason(tmp_path: Path) -> None:
    tokenizer_files.dropping("abc").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"the input has 1 token, .*: the tokenizer has no token for 4 characters"):
        prepare([Documents(["xyzx"])], tmp_path / "out", str(tmp_path / "tokenizer.json"))


def test_a_folder_s_tokenizer_ends_documents_as_the_folder_says(tmp_path: Path) -> None:
    """By its file, or by the folder's name; the files beside it come along."""
    (tmp_path / "hf").mkdir()
    tokenizer_files.byte_level(["<a>", "<b>"], first=True).save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<b>"}')
    for number, name in enumerate(("hf", "hf/tokenizer.json", "out0")):
        folder = prepare([Documents(["one", "two", "three"])], tmp_path / f"out{number}", str(tmp_path / name))
        assert folder.manifest.end == folder.tokenizer().end == 1
        assert "tokenizer_config.json" in folder.manifest.files
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="bare is a folder without a tokenizer"):
        prepare([Documents(["one"])], tmp_path / "out", str(tmp_path / "bare"))


def test_tokens_of_nanogpt_are_prepared_by_their_tokenizer(tmp_path: Path) -> None:
    tokenizer_files.byte_level().save(str(tmp_path / "tokenizer.json"))
    np.array([1, 2, 256, 3, 4, 5, 256, 6, 7], np.uint16).tofile(tmp_path / "train.bin")
    source = Input.from_path(tmp_path / "train.bin", None, "text")
    folder = prepare([source], tmp_path / "out", str(tmp_path / "tokenizer.json"), validation=0.3)
    assert folder.run("training").tokens.tolist() == [1, 2, 256, 3, 4, 5, 256]
    assert folder.run("training").starts.tolist() == [3]
    with pytest.raises(UserError, match=r"train.bin has tokens, not a text; name their tokenizer by --tokenizer"):
        prepare([source], tmp_path / "again")
    for more in ({"tokenizer": "chars"}, {"train_bpe": 300}):
        with pytest.raises(UserError, match="these are tokens, not a text; name their tokenizer"):
            prepare([source], tmp_path / "again", **more)  # pyright: ignore


def test_documents_of_an_iterable_are_prepared_as_a_file_is(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(20)]
    of_file = prepare([lines_of(tmp_path / "a.jsonl", texts)], tmp_path / "file", "chars")
    listed = prepare([Documents(texts, "mine")], tmp_path / "list", "chars")
    assert listed.manifest.sources == ("mine",)
    for name in ("training.bin", "validation.bin", "training.documents.bin", "training.sizes.bin", "vocabulary.json"):
        assert (listed.folder / name).read_bytes() == (of_file.folder / name).read_bytes()
    again = prepare([Documents(iter(texts))], tmp_path / "again", listed.tokenizer())
    assert (again.folder / "training.bin").read_bytes() == (of_file.folder / "training.bin").read_bytes()
    with pytest.raises(UserError, match="can be read only once"):
        prepare([Documents(iter(texts))], tmp_path / "once", "chars")


BYTES = ByteTokenizer()
LLAMA = HuggingFace(tokenizer_files.byte_fallback(["is", "it"], bos=True).to_str().encode())
BYTE_LEVEL = HuggingFace(tokenizer_files.byte_level().to_str().encode())
LETTERS = HuggingFace(tokenizer_files.dropping("abcdefgh ").to_str().encode())


def documents_of(text: EncodedText) -> list[list[int]]:
    places = np.array(text.ends.tokens)[np.array(text.ends.documents)]
    return [tokens.tolist() for tokens in np.split(text.tokens, places[1:-1])]


def test_a_document_has_the_tokens_that_begin_and_end_it() -> None:
    text = encode_in_memory(Documents(["is it", "", "it"]), LLAMA)
    first, last = (LLAMA.encode([word])[0].tolist() for word in (b"is it", b"it"))
    assert documents_of(text) == [[1, *first, 2], [1, *last, 2]]


def test_tokens_are_taken_as_they_are_and_begin_anew_after_each_end() -> None:
    text = encode_in_memory(Documents([[5, 6, 2, 7, 2], np.array([8, 2, 9], np.uint16)]), LLAMA)
    assert documents_of(text) == [[5, 6, 2], [7, 2], [8, 2], [9]]


@pytest.mark.parametrize("tokens", [[3, 257], [-1, 3]])
def test_a_token_that_the_tokenizer_has_not_is_refused(tokens: list[int]) -> None:
    with pytest.raises(UserError, match=r"token (257|-1) is not in the vocabulary of 257 tokens \(tokenizer.json\)"):
        encode_in_memory(Documents([tokens], "mine"), BYTE_LEVEL)


@pytest.mark.parametrize("tokenizer", [BYTES, BYTE_LEVEL, LLAMA, LETTERS], ids=["bytes", "byte-level", "llama", "few"])
@given(documents=st.lists(st.text("abc €漢", max_size=12), min_size=1, max_size=8), data=st.data())
def test_bytes_are_those_of_the_text_wherever_it_is_cut(
    tokenizer: Tokenizer, documents: list[Document], data: st.DataObject
) -> None:
    text = encode_in_memory(Documents(documents), tokenizer)
    cut = data.draw(st.integers(0, len(text.tokens)))
    parts = [text.ends.part(text.tokens, *span, tokenizer) for span in ((0, cut), (cut, len(text.tokens)))]
    sizes = [0 if part.sizes is None else int(part.sizes.sum()) for part in parts]
    assert sum(sizes) == sum(len(str(document).encode()) for document in documents)
    assert all(part.sizes is not None and len(part.sizes) == part.documents for part in parts)
    whole = text.ends.part(text.tokens, 0, len(text.tokens), tokenizer)
    assert whole.sizes is not None
    if tokenizer is not LETTERS:  # each document has tokens
        assert whole.sizes.tolist() == [len(str(document).encode()) for document in documents if document] or not len(
            text.tokens
        )
        before = tokenizer.count_bytes(text.tokens[:cut])
        assert abs(before - sizes[0]) <= len(documents), "a decoder drops a space where a document begins"


def test_dropped_characters_count_as_text_and_are_reported() -> None:
    text = encode_in_memory(Documents(["a bad öd", "öß"]), LETTERS)
    run = text.ends.part(text.tokens, 0, len(text.tokens), LETTERS)
    assert run.sizes is not None
    assert run.sizes.tolist() == [9, 4]
    assert text.lost_counts == {"ö": 2, "ß": 1}
    assert lost_text(text.lost_counts) == (
        "the tokenizer has no token for 3 characters of the text, which are dropped ('ö', 'ß')"
    )
    assert lost_text({"<unk>": 7}).endswith("7 words or characters of the text, which become '<unk>'")
    assert lost_text(Counter()) == ""
