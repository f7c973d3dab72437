/* Leaves of the tree of write records: read from a file, and made into columns. No function of LMDB is used, and what a
   page says is checked before it is followed, as in perco/arrow/leaves.py and columns.py, which do the same with numpy.
   See native.h. */

#include "native.h"
#include <unistd.h>

#define HEAD 16     /* bytes of a page before the places of its nodes */
#define NODE 8      /* bytes of a node before its key */
#define KEY_MIN (TAIL + 2)
#define KINDS 0x6f  /* the flags of a page that say what it is */
#define LEAF 2
#define RECORD 9    /* bytes of a record before its body */
#define COLUMNS_MAX 64
enum { PUT = 1, PUT_DATA = 2, KIND_MAX = 4 };

typedef struct {
    uint32_t key; /* where it begins in the leaves; the value follows it */
    uint16_t key_size, value_size;
} Cell;

typedef struct { /* a record that a snapshot sees */
    uint32_t cell, row;
    uint8_t column, is_long;
} Hit;

typedef struct {
    const char *data, *low, *end;
    Py_ssize_t low_size, end_size, count;
    size_t page, pages, wanted;
    const uint64_t *numbers;
    const uint32_t *columns;
    uint64_t newest; /* cells with a smaller inverted timestamp are too new */
    int more;

    Cell *cells;
    size_t total, first, last; /* [first, last): the cells of whole rows within the range */
    int64_t after;             /* a cell of the row at which to continue; -1: none */
    Hit *hits;
    size_t n_hits, rows;
    uint32_t *row_cells; /* a cell of each row that has a value */
} Walk;

static uint16_t
short_at(const char *at)
{
    uint16_t n;
    memcpy(&n, at, 2);
    return n;
}

/* Find all cells. The cells of a page do not overlap, so all keys and values together are no longer than the leaves.
   Returns -1 if a page is impossible, or memory is short. */
static int
find_cells(Walk *walk)
{
    size_t n = 0;
    for (size_t p = 0; p < walk->pages; p++) {
        const char *page = walk->data + p * walk->page;
        uint64_t number;
        memcpy(&number, page, 8);
        uint16_t lower = short_at(page + 12), upper = short_at(page + 14);
        if (number != walk->numbers[p] || (short_at(page + 10) & KINDS) != LEAF || lower <= HEAD || lower % 2 ||
            lower > upper || upper > walk->page)
            return -1;
        n += (lower - HEAD) / 2;
    }
    if (!(walk->cells = malloc(n * sizeof *walk->cells)))
        return -1;
    Cell *cell = walk->cells;
    for (size_t p = 0; p < walk->pages; p++) {
        size_t at = p * walk->page;
        const char *page = walk->data + at;
        uint16_t lower = short_at(page + 12), upper = short_at(page + 14);
        size_t used = 0;
        for (size_t slot = HEAD; slot < lower; slot += 2, cell++) {
            size_t place = short_at(page + slot);
            if (place < upper || place % 2 || place + NODE + KEY_MIN > walk->page)
                return -1;
            uint64_t node;
            memcpy(&node, page + place, 8);
            cell->value_size = (uint16_t)node;
            cell->key_size = (uint16_t)(node >> 48);
            if (node & 0xffffffff0000 || cell->key_size < KEY_MIN || cell->key_size > KEY_MAX ||
                place + NODE + cell->key_size + cell->value_size > walk->page)
                return -1;
            cell->key = (uint32_t)(at + place + NODE);
            used += NODE + cell->key_size + cell->value_size;
        }
        if (used > walk->page - upper)
            return -1;
    }
    walk->total = n;
    return 0;
}

/* The first of the first `n` cells whose key is at or after a key. */
static size_t
search(const Walk *walk, size_t n, const char *key, size_t size)
{
    size_t low = 0;
    while (low < n) {
        size_t middle = (low + n) / 2;
        const Cell *cell = &walk->cells[middle];
        if (compare(walk->data + cell->key, cell->key_size, key, size) < 0)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

enum { MORE = 1 }; /* besides 0 and -1: not even the first row is among the cells */

/* Choose the cells (`walk` in leaves.py). Returns 0 or MORE. */
static int
choose(Walk *walk)
{
    const char *after = NULL;
    size_t size = 0;
    walk->first = search(walk, walk->total, walk->low, (size_t)walk->low_size);
    walk->last = walk->total;
    walk->after = -1;
    if (walk->total > walk->first + (size_t)walk->count || walk->more) {
        size_t at = walk->first + (size_t)walk->count;
        const Cell *cell = &walk->cells[at < walk->total ? at : walk->total - 1];
        after = walk->data + cell->key;
        size = cell->key_size - TAIL;
        walk->last = search(walk, walk->total, after, size);
        walk->after = cell - walk->cells;
    }
    if (walk->end_size && (!after || compare(after, size, walk->end, (size_t)walk->end_size) >= 0)) {
        walk->last = search(walk, walk->last, walk->end, (size_t)walk->end_size);
        walk->after = -1;
    }
    else if (after && (walk->last <= walk->first || compare(after, size, walk->low, (size_t)walk->low_size) <= 0))
        return MORE;
    if (walk->last < walk->first)
        walk->last = walk->first;
    return 0;
}

/* Find what a snapshot sees: of each row and wanted column, the newest record at or below the timestamp, if it has a
   value. Returns -1 if one is not a record, or memory is short. */
static int
find_hits(Walk *walk)
{
    size_t n = walk->last - walk->first + 1;
    if (!(walk->hits = malloc(n * sizeof *walk->hits)) || !(walk->row_cells = malloc(n * sizeof *walk->row_cells)))
        return -1;
    const Cell *before = NULL; /* the cell that was seen last */
    size_t column = 0, of_before = 0;
    int counted = 0; /* the row of `before` has a number */
    for (size_t i = walk->first; i < walk->last; i++) {
        const Cell *cell = &walk->cells[i];
        const char *tail = walk->data + cell->key + cell->key_size - TAIL;
        uint32_t number;
        uint64_t inverted;
        memcpy(&number, tail, 4);
        memcpy(&inverted, tail + 4, 8);
        number = __builtin_bswap32(number);
        if (__builtin_bswap64(inverted) < walk->newest)
            continue;
        if (walk->columns[column] != number) {
            for (column = 0; column < walk->wanted && walk->columns[column] != number;)
                column++;
            if (column == walk->wanted) {
                column = 0;
                continue;
            }
        }
        int same = before && before->key_size == cell->key_size &&
                   !memcmp(walk->data + before->key, walk->data + cell->key, cell->key_size - TAIL);
        if (!same)
            counted = 0;
        int newest = !same || column != of_before;
        before = cell;
        of_before = column;
        if (!newest)
            continue;
        int kind = cell->value_size < RECORD ? 0 : (unsigned char)walk->data[cell->key + cell->key_size];
        if (kind < PUT || kind > KIND_MAX)
            return -1;
        if (kind > PUT_DATA)
            continue;
        if (!counted)
            walk->row_cells[walk->rows++] = (uint32_t)i;
        counted = 1;
        walk->hits[walk->n_hits++] =
            (Hit){(uint32_t)i, (uint32_t)(walk->rows - 1), (uint8_t)column, kind == PUT_DATA};
    }
    return 0;
}

static PyObject *
bytes_of(size_t size)
{
    return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
}

/* (offsets, bytes) of all rows' prefixes. */
static PyObject *
prefixes_of(const Walk *walk)
{
    size_t size = 0;
    for (size_t r = 0; r < walk->rows; r++)
        size += walk->cells[walk->row_cells[r]].key_size - TAIL;
    PyObject *bounds = bytes_of((walk->rows + 1) * sizeof(int32_t)), *data = bytes_of(size);
    if (bounds && data) {
        int32_t *offsets = (int32_t *)PyBytes_AS_STRING(bounds), at = 0;
        for (size_t r = 0; r < walk->rows; r++) {
            const Cell *cell = &walk->cells[walk->row_cells[r]];
            offsets[r] = at;
            memcpy(PyBytes_AS_STRING(data) + at, walk->data + cell->key, cell->key_size - TAIL);
            at += cell->key_size - TAIL;
        }
        offsets[walk->rows] = at;
    }
    return Py_BuildValue("(NN)", bounds, data); /* with NULL, it returns NULL, and has released the other one */
}

/* (rows, offsets, bodies, long) of a column. long: for each value in a data group, its index in the column, the prefix
   of its row, and its record. */
static PyObject *
column_of_hits(const Walk *walk, size_t column)
{
    size_t n = 0, size = 0, i = 0;
    for (size_t h = 0; h < walk->n_hits; h++)
        if (walk->hits[h].column == column) {
            n++;
            size += walk->cells[walk->hits[h].cell].value_size - RECORD;
        }
    PyObject *numbers = bytes_of(n * sizeof(int64_t)), *bounds = bytes_of((n + 1) * sizeof(int32_t));
    PyObject *data = bytes_of(size), *longs = PyList_New(0);
    if (!numbers || !bounds || !data || !longs)
        return Py_BuildValue("(NNNN)", numbers, bounds, data, longs);
    int64_t *rows = (int64_t *)PyBytes_AS_STRING(numbers);
    int32_t *offsets = (int32_t *)PyBytes_AS_STRING(bounds), at = 0;
    for (size_t h = 0; h < walk->n_hits; h++) {
        const Hit *hit = &walk->hits[h];
        if (hit->column != column)
            continue;
        const Cell *cell = &walk->cells[hit->cell];
        const char *value = walk->data + cell->key + cell->key_size;
        rows[i] = hit->row;
        offsets[i] = at;
        memcpy(PyBytes_AS_STRING(data) + at, value + RECORD, cell->value_size - RECORD);
        at += cell->value_size - RECORD;
        if (hit->is_long) {
            PyObject *found = Py_BuildValue("(ny#y#)", (Py_ssize_t)i, walk->data + cell->key,
                                            (Py_ssize_t)cell->key_size - TAIL, value, (Py_ssize_t)cell->value_size);
            int rc = found ? PyList_Append(longs, found) : -1;
            Py_XDECREF(found);
            if (rc) {
                Py_DECREF(numbers);
                Py_DECREF(bounds);
                Py_DECREF(data);
                Py_DECREF(longs);
                return NULL;
            }
        }
        i++;
    }
    offsets[n] = at;
    return Py_BuildValue("(NNNN)", numbers, bounds, data, longs);
}

/* columns(leaves, their numbers, page size, low, end, count, more, columns, newest) -> (prefix of the row at which to
   continue, number of cells, number of rows, prefixes, [column]); False: `count` has to be greater; or None: Python has
   to do it, or to say what is wrong. */
PyObject *
leaf_columns(PyObject *self, PyObject *args)
{
    Py_buffer data, numbers, columns;
    Walk walk = {0};
    Py_ssize_t page;
    unsigned long long newest;
    if (!PyArg_ParseTuple(args, "y*y*ny#y#npy*K", &data, &numbers, &page, &walk.low, &walk.low_size, &walk.end,
                          &walk.end_size, &walk.count, &walk.more, &columns, &newest))
        return NULL;
    walk.data = data.buf;
    walk.numbers = numbers.buf;
    walk.columns = columns.buf;
    walk.newest = newest;
    walk.pages = (size_t)numbers.len / 8;
    walk.wanted = (size_t)columns.len / 4;
    walk.page = (size_t)page;
    int rc = -1;
    /* The leaves must not change while the GIL is released: they are bytes, or in the memory of the reader that waits for
       this call (walking.py). */
    if ((PyBytes_Check(data.obj) || PyMemoryView_Check(data.obj)) && page >= 256 && page <= 65536 && walk.pages && walk.count > 0 && data.len <= INT32_MAX &&
        (size_t)data.len == walk.pages * walk.page && walk.wanted && walk.wanted <= COLUMNS_MAX) {
        Py_BEGIN_ALLOW_THREADS
        rc = find_cells(&walk);
        rc = rc ? rc : choose(&walk);
        rc = rc ? rc : find_hits(&walk);
        Py_END_ALLOW_THREADS
    }
    PyObject *made = NULL;
    if (!rc) {
        const Cell *after = walk.after < 0 ? NULL : &walk.cells[walk.after];
        PyObject *list = PyList_New((Py_ssize_t)walk.wanted);
        for (size_t c = 0; list && c < walk.wanted; c++) {
            PyObject *column = column_of_hits(&walk, c);
            if (!column)
                Py_CLEAR(list);
            else
                PyList_SET_ITEM(list, (Py_ssize_t)c, column);
        }
        made = !list ? NULL
                     : Py_BuildValue("(y#nnNN)", after ? walk.data + after->key : "",
                                     after ? (Py_ssize_t)after->key_size - TAIL : 0, (Py_ssize_t)(walk.last - walk.first),
                                     (Py_ssize_t)walk.rows, prefixes_of(&walk), list);
    }
    free(walk.cells);
    free(walk.hits);
    free(walk.row_cells);
    PyBuffer_Release(&data);
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&columns);
    if (rc == MORE)
        Py_RETURN_FALSE;
    if (rc)
        Py_RETURN_NONE;
    return made;
}

/* pages(file, page size, numbers, memory) -> whether those pages could be read whole, one after the other. */
PyObject *
leaf_pages(PyObject *self, PyObject *args)
{
    int file;
    Py_ssize_t page;
    Py_buffer numbers, memory;
    if (!PyArg_ParseTuple(args, "iny*w*", &file, &page, &numbers, &memory))
        return NULL;
    size_t n = (size_t)numbers.len / 8;
    const uint64_t *at = numbers.buf;
    int whole = page > 0 && page <= 65536 && (size_t)memory.len == n * (size_t)page;
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < n && whole;) {
        size_t run = 1; /* pages that lie side by side are read at once */
        while (i + run < n && at[i + run] == at[i] + run)
            run++;
        size_t size = run * (size_t)page;
        off_t from = (off_t)(at[i] * (uint64_t)page);
        char *to = (char *)memory.buf + i * (size_t)page;
        whole = at[i] < (uint64_t)1 << 40 && pread(file, to, size, from) == (ssize_t)size;
        i += run;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&memory);
    return PyBool_FromLong(whole);
}
