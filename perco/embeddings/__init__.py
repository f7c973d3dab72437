"""An index of texts by their meaning: chunks, their vectors, and a search for the nearest of them."""

from perco.embeddings.chunks import Chunk as Chunk, split as split
from perco.embeddings.hashed import embed as embed
from perco.embeddings.index import Embed as Embed, EmbeddingIndex as EmbeddingIndex, Passage as Passage
