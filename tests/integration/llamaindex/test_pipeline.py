"""Runs that stop at each step, runs at the same time, and what a pipeline refuses."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

import perco
import perco.aio
import perco.sync

pytest.importorskip("llama_index.core")

from llama_index.core.embeddings.mock_embed_model import MockEmbedding
from llama_index.core.ingestion import IngestionCache
from llama_index.core.schema import (
    BaseNode,
    Document,
    MediaResource,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
    TransformComponent,
)

from perco.llamaindex import TABLES, Cache, DocumentStore, Pipeline
from perco.llamaindex.ingesting import Written, _size
from perco.llamaindex.pipeline import _Add, _Ask, _Delete, _Steps, _Transform
from perco.llamaindex.stores import Prepared
from perco.llamaindex.values import AT_ONCE, BYTES_AT_ONCE, in_parts
from tests.integration.llamaindex.support import DELETE, DUPLICATES, UPSERTS, Failing, Vectors, doc, ours, splitter

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs


class Counting(MockEmbedding):
    """Counts what is embedded."""

    def __init__(self) -> None:
        super().__init__(embed_dim=2)
        self._texts: list[str] = []

    @property
    def texts(self) -> list[str]:
        return self._texts

    def __call__(self, nodes: Sequence[BaseNode], **how: Any) -> Sequence[BaseNode]:
        self._texts += [node.get_content() for node in nodes]
        return super().__call__(nodes, **how)


class Stopped(BaseException):
    pass


class Stopping(Pipeline):
    """Ends after so many steps: the last one has been done, and nobody has been told."""

    left: int = 0

    def __init__(self, left: int, **how: Any) -> None:
        super().__init__(**how)
        self.left = left

    def _steps(self, *args: Any) -> _Steps:
        steps = super()._steps(*args)
        answer = None
        left = self.left
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as ended:
                return ended.value
            answer = yield step
            left -= 1
            if left == 0:
                raise Stopped


BEFORE = [doc("a", "old"), doc("b", "as it was"), doc("c", "gone"), doc("d", "same"), doc("e", "same")]
AFTER = [doc("a", "new"), doc("b", "as it was"), doc("e", "same"), doc("f", "more")]


@pytest.mark.parametrize("back", [False, True])
def test_a_run_that_ends_at_any_step_is_made_up_for(tmp_path: Path, back: bool) -> None:  # LI1, LI2, LI3
    """The next run is given the newer documents again, or the older ones."""
    stops = 0
    while True:
        stops += 1
        vectors = Vectors()
        with perco.sync.open(tmp_path / f"stop {stops}", perco.Schema(*TABLES)) as db:

            def make(kind: Any = Pipeline, **how: Any) -> Pipeline:
                stores = {"docstore": DocumentStore(db), "vector_store": vectors}  # noqa: B023
                by = [splitter(), MockEmbedding(embed_dim=2)]
                made: Pipeline = kind(transformations=by, docstore_strategy=DELETE, batch=2, **stores, **how)
                return made

            make().run(documents=BEFORE)
            try:
                make(Stopping, left=stops).run(documents=AFTER)
                ended = True
            except Stopped:
                ended = False
            documents = BEFORE if back else AFTER
            make().run(documents=documents)
            make().run(documents=documents)  # a document that a dead run has begun is written twice
            assert vectors.texts == sorted(each.get_content() for each in documents), stops
            assert set(DocumentStore(db).docs) == {each.id_ for each in documents}
            written = len(vectors.added)
            make().run(documents=documents)
            assert len(vectors.added) == written, stops
        if ended:
            break
    assert stops > 15


def test_two_runs_that_write_one_document_do_not_note_it(
    db: perco.sync.Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The other run does all of its work while the first is about to write."""
    vectors = Vectors()
    make = ours(vectors, db)
    make().run(documents=[doc("a", "zero")])
    begun: list[bool] = []

    def other() -> None:
        if not begun:
            begun.append(True)
            make().run(documents=[doc("a", "two")])

    vectors.before_add(other)
    with caplog.at_level(logging.WARNING, "perco.llamaindex"):
        make().run(documents=[doc("a", "one")])
    assert [record.name for record in caplog.records] == ["perco.llamaindex"] * 2
    assert DocumentStore(db).get_document_hash("a") is None
    vectors.before_add(None)
    make().run(documents=[doc("a", "one")])
    assert vectors.texts == ["one"]
    assert DocumentStore(db).get_document_hash("a") == doc("a", "one").hash


def do(step: Any, vectors: Vectors) -> Any:
    match step:
        case _Ask(of, function, args):
            return of.ask(function, *args)
        case _Transform(by, nodes):
            return by(nodes)
        case _Delete(id):
            return vectors.delete(id)
        case _Add(nodes):
            return vectors.add(nodes)


def rows_left(db: perco.sync.Database) -> list[Any]:
    with db.snapshot() as snap:
        return [row.key for table in TABLES for row in snap.scan(table)]


def test_two_runs_may_take_their_steps_in_any_order(db: perco.sync.Database) -> None:  # LI1, LI2, LI4
    for seed in range(100):
        random, vectors = Random(seed), Vectors()

        def make(source: str = "one") -> Any:
            return Pipeline(
                transformations=[splitter(), MockEmbedding(embed_dim=2)],
                docstore=DocumentStore(db),
                vector_store=vectors,  # noqa: B023
                docstore_strategy=DELETE,
                source=source,
                disable_cache=True,
            )

        given = [[*random.choice([[doc("a", "one")], []]), doc("b", "both")], random.choice([[doc("a", "two")], []])]
        source = random.choice(["one", "other"])
        make("one").run(documents=[doc("a", "zero")])
        runs = [make("one")._begin(given[0], None, None, True, False, None)]
        runs.append(make(source)._begin(given[1], None, None, True, False, None))
        while runs:
            run = random.choice(runs)
            try:
                run.answer = do(next(run), vectors)
            except StopIteration:
                runs.remove(run)
        left: dict[str, str] = {}
        for name, documents in {"one": given[0], **({"other": given[1]} if source == "other" else {})}.items():
            make(name).run(documents=documents)
            left.update({each.id_: each.get_content() for each in documents})
        assert vectors.texts == sorted(left.values()), seed
        for name in ("one", "other"):
            make(name).run(documents=[])
        assert (vectors.texts, rows_left(db)) == ([], []), seed


def test_parts_that_a_document_has_lost_go(db: perco.sync.Database) -> None:
    def parts(*texts: str) -> list[BaseNode]:
        of = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="a")}
        return [TextNode(id_=str(at), text=text, relationships=of) for at, text in enumerate(texts)]

    vectors, store = Vectors(), DocumentStore(db)
    make = ours(vectors, db)
    for texts in (("one", "two"), ("one", "2"), ("one",)):
        make(Failing(text="-"), disable_cache=True).run(nodes=parts(*texts))
        assert vectors.texts == sorted(texts)
        assert sorted(store.docs) == [str(at) for at in range(len(texts))]
    make(strategy=DELETE).run(documents=[])
    assert (vectors.texts, rows_left(db)) == ([], [])


def test_a_node_does_not_make_a_document_a_duplicate(db: perco.sync.Database) -> None:
    vectors = Vectors()
    of = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="a")}
    DocumentStore(db).add_documents([Document(id_="n", text="x", relationships=of)])
    ours(vectors, db)(strategy=DUPLICATES).run(documents=[doc("d", "x")])
    assert vectors.texts == ["x"]


class Seeing(TransformComponent):
    """Describes images."""

    def __call__(self, nodes: Sequence[BaseNode], **how: Any) -> Sequence[BaseNode]:
        found = []
        for node in nodes:
            image = getattr(node, "image_resource", None)
            if image is not None:
                node = doc(node.node_id, repr(image.data))
            found.append(node)
        return found


def test_images_are_told_apart_and_are_not_lost(db: perco.sync.Database) -> None:  # LI5
    vectors = Vectors()
    for data in (b"one ", b"two ", b"one "):
        image = Document(id_="a", image_resource=MediaResource(data=data, mimetype="image/png"))
        for turn in range(2):
            make = ours(vectors, db)
            if turn == 0:  # the first transformation is called, and the second one fails
                with pytest.raises(ConnectionError):
                    make(Failing(text="-"), Seeing(), Failing(text="b'")).run(documents=[image])
            else:
                make(Failing(text="-"), Seeing()).run(documents=[image])
        assert vectors.texts == [repr(MediaResource(data=data).data)]


def test_what_is_too_long_is_not_kept(db: perco.sync.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perco.llamaindex.pipeline._CACHED_BYTES_MAX", 2000)
    ours(Vectors(), db)(Failing(text="-")).run(documents=[doc("a", "x"), doc("b", "x" * 2000)])
    assert len(Cache(db).cache.get_all(Cache(db).collection)) == 2


def test_documents_are_noted_in_parts() -> None:
    def parts(nodes: int, size: int) -> list[int]:
        each = Written("a", "", [Prepared("n", b"x" * size, "", None, {})] * nodes)
        return [len(some) for some in in_parts([each] * 5, _size)]

    assert parts(AT_ONCE // 2, 1) == [2, 2, 1]
    assert parts(AT_ONCE + 1, 1) == [1] * 5
    assert parts(1, BYTES_AT_ONCE // 2) == [2, 2, 1]


def test_what_was_transformed_is_not_transformed_again(db: perco.sync.Database) -> None:  # LI5
    vectors, embedding = Vectors(), Counting()
    how: dict[str, Any] = {"docstore": DocumentStore(db), "vector_store": vectors}

    def fail() -> None:
        raise ConnectionError

    vectors.before_add(fail)
    with pytest.raises(ConnectionError):
        Pipeline(transformations=[splitter(), embedding], **how).run(documents=[doc("a", "one"), doc("b", "two")])
    vectors.before_add(None)
    documents = [doc("a", "one"), doc("b", "2"), doc("c", "three")]
    Pipeline(transformations=[splitter(), embedding], **how).run(documents=documents)
    assert embedding.texts == ["one", "two", "2", "three"]
    assert vectors.texts == ["2", "one", "three"]
    Pipeline(transformations=[splitter(), embedding], **how).run(documents=[doc("b", "two")])
    assert embedding.texts[4:] == []
    Pipeline(transformations=[splitter(), embedding], disable_cache=True, **how).run(documents=[doc("b", "2")])
    assert embedding.texts[4:] == ["2"]


def test_batches_before_one_that_fails_are_noted(db: perco.sync.Database) -> None:
    vectors = Vectors()
    make = ours(vectors, db)
    documents = [doc(str(number), f"text {number}") for number in range(5)]
    with pytest.raises(ConnectionError):
        make(Failing(text="text 3"), batch=2).run(documents=documents)
    assert vectors.texts == ["text 0", "text 1"]
    nodes = make().run(documents=documents)
    assert [node.get_content() for node in nodes] == ["text 2", "text 3", "text 4"]
    assert documents[0].relationships == {}, "a run works with copies"


def test_a_document_that_two_sources_have_stays_until_both_have_lost_it(db: perco.sync.Database) -> None:  # LI4
    vectors = Vectors()
    make = ours(vectors, db)
    for source in ("one", "other"):
        make(strategy=DELETE, source=source).run(documents=[doc("a", "shared")])
    assert vectors.added == ["shared"]
    make(strategy=DELETE, source="one").run(documents=[])
    assert vectors.texts == ["shared"]
    make(strategy=DELETE, source="one").run(documents=[])
    assert vectors.texts == ["shared"]
    make(strategy=DELETE, source="other").run(documents=[])
    assert (vectors.texts, DocumentStore(db).docs) == ([], {})


def test_upserts_and_duplicates_delete_nothing_that_is_not_given(db: perco.sync.Database) -> None:
    vectors = Vectors()
    make = ours(vectors, db)
    make(strategy=UPSERTS).run(documents=[doc("a", "one"), doc("b", "two")])
    make(strategy=UPSERTS).run(documents=[doc("a", "ONE")])
    assert vectors.texts == ["ONE", "two"]
    make(strategy=DUPLICATES).run(documents=[doc("c", "two"), doc("d", "new"), doc("e", "new")])
    assert vectors.texts == ["ONE", "new", "two"]
    assert sorted(DocumentStore(db).docs) == ["a", "b", "d"]


def test_a_document_that_was_deleted_by_hand_is_ingested_again(db: perco.sync.Database) -> None:
    vectors = Vectors()
    make = ours(vectors, db)
    make(strategy=DELETE).run(documents=[doc("a", "one")])
    vectors.delete("a")
    DocumentStore(db).delete_document("a")
    make(strategy=DELETE).run(documents=[])
    make(strategy=DELETE).run(documents=[doc("a", "one")])
    assert vectors.texts == ["one"]


def test_a_document_that_is_deleted_by_hand_during_a_run_is_not_forgotten(db: perco.sync.Database) -> None:
    vectors = Vectors()
    make = ours(vectors, db)
    vectors.before_add(lambda: DocumentStore(db).delete_document("a"))
    make(strategy=DELETE).run(documents=[doc("a", "one")])
    vectors.before_add(None)
    make(strategy=DELETE).run(documents=[])
    assert vectors.texts == []


def test_a_document_without_parts_is_replaced_too(db: perco.sync.Database) -> None:
    vectors = Vectors()
    make = ours(vectors, db)
    for text in ("one", "two"):
        make(Failing(text="-"), strategy=DELETE).run(documents=[doc("a", text)])
    assert (vectors.texts, vectors.documents) == (["two"], ["a"])
    make(Failing(text="-"), strategy=DELETE).run(documents=[])
    assert vectors.texts == []


class Lost(TransformComponent):
    def __call__(self, nodes: Sequence[BaseNode], **how: Any) -> Sequence[BaseNode]:
        return [TextNode(id_="x", text="from nowhere")]


def test_what_does_not_fit_is_refused(db: perco.sync.Database) -> None:
    vectors, store = Vectors(), DocumentStore(db)
    make = ours(vectors, db)
    with pytest.raises(perco.UsageError, match="Lost gave node x, which belongs to no document"):
        make(Lost()).run(documents=[doc("a", "one")])
    with pytest.raises(perco.UsageError, match="no node of document a has an embedding"):
        Pipeline(transformations=[splitter()], docstore=store, vector_store=vectors).run(documents=[doc("a", "one")])
    with pytest.raises(perco.UsageError, match="leave out num_workers="):
        make().run(documents=[doc("a", "one")], num_workers=2)
    assert (vectors.added, store.docs) == ([], {})
    given: list[tuple[dict[str, Any], str]] = [
        ({"docstore": None}, r"docstore=perco\.llamaindex\.DocumentStore\(db\)"),
        ({"vector_store": None}, "takes vector_store="),
        ({"cache": IngestionCache()}, r"cache=perco\.llamaindex\.Cache\(db\)"),
        ({"batch": 0}, "at least 1"),
        ({"volatile": "date"}, "a list of names"),
    ]
    for change, message in given:
        how: dict[str, Any] = {"docstore": store, "vector_store": vectors, **change}
        with pytest.raises(perco.UsageError, match=message):
            Pipeline(transformations=[], **how)


def test_the_cache_may_lie_in_another_store(db: perco.sync.Database, tmp_path: Path) -> None:
    with perco.sync.open(tmp_path / "cache", perco.Schema(*TABLES)) as other:
        cache, embedding = Cache(other), Counting()
        for namespace in ("one", "other"):
            how: dict[str, Any] = {"docstore": DocumentStore(db, namespace), "vector_store": Vectors(), "cache": cache}
            Pipeline(transformations=[embedding], **how).run(documents=[doc("a", "one")])
        assert embedding.texts == ["one"]
        assert Cache(db).cache.get_all(cache.collection) == {}
        assert len(cache.cache.get_all(cache.collection)) == 1


def test_nothing_is_saved_or_loaded(db: perco.sync.Database, tmp_path: Path) -> None:
    pipeline: Any = ours(Vectors(), db)()
    pipeline.run(documents=[doc("a", "one")])
    pipeline.persist(str(tmp_path / "saved"))
    pipeline.load(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()
    assert list(pipeline.docstore.docs) == ["a"]


def test_a_store_of_asyncio(tmp_path: Path) -> None:
    async def main() -> None:
        async with perco.aio.open(tmp_path / "ingested", perco.Schema(*TABLES)) as db:
            vectors = Vectors()
            make = ours(vectors, db)
            await make(strategy=DELETE).arun(documents=[doc("a", "one"), doc("b", "two")])
            await make(strategy=DELETE).arun(documents=[doc("a", "ONE")])
            assert vectors.texts == ["ONE"]
            with pytest.raises(perco.UsageError, match="use the async methods"):
                make().run(documents=[doc("a", "one")])

    asyncio.run(main())


PROGRAM = """
import json
import sys
from pathlib import Path

from llama_index.core.embeddings.mock_embed_model import MockEmbedding

import perco
import perco.sync
from perco.llamaindex import TABLES, DocumentStore, Pipeline
from tests.integration.llamaindex.support import DELETE, doc, splitter
from tests.integration.llamaindex.test_pipeline import Files

folder = Path(sys.argv[1])
with perco.sync.open(folder / "ingested", perco.Schema(*TABLES)) as db:
    turn = 0
    while True:
        turn += 1
        Pipeline(
            transformations=[splitter(), MockEmbedding(embed_dim=2)], docstore=DocumentStore(db),
            vector_store=Files(folder / "vectors"), docstore_strategy=DELETE, batch=3,
        ).run(documents=[doc(str(number), f"text {number} {turn}") for number in range(turn % 3, 8)])
        if turn == 3:
            print("running", flush=True)
"""


class Files(Vectors):
    """A vector store that a killed process leaves as it was: a file for each node."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        object.__setattr__(self, "folder", folder)
        folder.mkdir(exist_ok=True)

    def add(self, nodes: Sequence[BaseNode], **how: Any) -> list[str]:
        folder: Path = self.folder  # type: ignore[attr-defined]
        for node in nodes:
            (folder / f"{node.ref_doc_id} {node.node_id}").write_text(node.get_content())
        return super().add(nodes, **how)

    def delete(self, ref_doc_id: str, **how: Any) -> None:
        for path in self.folder.glob(f"{ref_doc_id} *"):  # type: ignore[attr-defined]
            path.unlink()


def test_a_program_that_is_killed_leaves_what_the_next_run_makes_right(tmp_path: Path) -> None:  # LI1, LI2
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            process.kill()
    documents = [Document(id_=str(number), text=f"text {number}") for number in range(5)]
    with perco.sync.open(tmp_path / "ingested", perco.Schema(*TABLES)) as db:
        for _ in range(2):
            Pipeline(
                transformations=[splitter(), MockEmbedding(embed_dim=2)],
                docstore=DocumentStore(db),
                vector_store=Files(tmp_path / "vectors"),
                docstore_strategy=DELETE,
            ).run(documents=documents)
        assert set(DocumentStore(db).docs) == {each.id_ for each in documents}
    left = sorted((path.name.split()[0], path.read_text()) for path in (tmp_path / "vectors").iterdir())
    assert left == [(each.id_, each.get_content()) for each in documents]
