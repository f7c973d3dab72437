/* Reads of rows, and pages of scans. They are made while the GIL is held, so no other read changes the view. See native.h.

   S3  A view is open only during a read or a page, or from a read that shares it until `end_shared`. */

#include "native.h"

/* ------------------------------------------------------------ reading a row (`read_row` in row.py) */

/* Add (timestamp, value) to a list, or, with `column`, (column, timestamp, value). `value` NULL: it is left empty. */
static int
add_cell(PyObject *cells, const MDB_val *key, const MDB_val *value, int column)
{
    PyObject *cell = PyTuple_New(2 + column);
    if (!cell)
        return -1;
    PyObject *bytes = PyBytes_FromStringAndSize(value ? value->mv_data : NULL, value ? (Py_ssize_t)value->mv_size : 0);
    PyTuple_SET_ITEM(cell, 1 + column, bytes);
    PyTuple_SET_ITEM(cell, column, PyLong_FromUnsignedLongLong(ts_of(key)));
    if (column)
        PyTuple_SET_ITEM(cell, 0, PyLong_FromUnsignedLong(column_of(key)));
    int rc = PyErr_Occurred() ? -1 : PyList_Append(cells, cell);
    Py_DECREF(cell);
    return rc;
}

/* The cells within [newest, oldest], two keys of one length. Returns 0; -1 with an exception; or an error of LMDB. */
static int
versions(MDB_cursor *cursor, const char *newest, const char *oldest, size_t size, int64_t n, PyObject *cells)
{
    MDB_val key = {size, (void *)(n >= 0 ? newest : oldest)}, value;
    int rc;
    if (n >= 0) {
        rc = n ? mdb.cursor_get(cursor, &key, &value, MDB_SET_RANGE) : MDB_NOTFOUND;
        while (!rc && compare(key.mv_data, key.mv_size, oldest, size) <= 0) {
            if (key.mv_size < TAIL || add_cell(cells, &key, &value, 0))
                return -1;
            if (!--n)
                return 0;
            rc = mdb.cursor_get(cursor, &key, &value, MDB_NEXT);
        }
        return rc == MDB_NOTFOUND ? 0 : rc;
    }
    rc = mdb.cursor_get(cursor, &key, &value, MDB_SET_RANGE);
    if (rc == MDB_NOTFOUND)
        rc = mdb.cursor_get(cursor, &key, &value, MDB_LAST);
    else if (!rc && compare(key.mv_data, key.mv_size, oldest, size))
        rc = mdb.cursor_get(cursor, &key, &value, MDB_PREV);
    while (!rc && compare(key.mv_data, key.mv_size, newest, size) >= 0 &&
           compare(key.mv_data, key.mv_size, oldest, size) <= 0) {
        if (key.mv_size < TAIL || add_cell(cells, &key, &value, 0))
            return -1;
        if (!++n)
            return 0;
        rc = mdb.cursor_get(cursor, &key, &value, MDB_PREV);
    }
    return rc == MDB_NOTFOUND ? 0 : rc;
}

/* read(row, queries, empty, shared) -> cells, or None: Python has to read it. */
PyObject *
Environment_read(Environment *self, PyObject *const *args, Py_ssize_t count)
{
    char newest[KEY_MAX], oldest[KEY_MAX];
    if (count != 4 || !PyBytes_Check(args[0]) || !IS_SEQUENCE(args[1]) || !PyAnySet_Check(args[2]))
        Py_RETURN_NONE;
    PyObject *queries = args[1], *empty = args[2];
    size_t prefix = prefix_of(args[0], newest);
    if (!prefix)
        Py_RETURN_NONE;
    memcpy(oldest, newest, prefix);
    Py_ssize_t asked = SIZE(queries);
    PyObject *out = PyList_New(asked);
    if (!out)
        return NULL;
    int back = 0, any = PySet_GET_SIZE(empty) > 0;
    for (Py_ssize_t i = 0; i < asked && !back; i++) {
        PyObject *query = ITEM(queries, i), *cells = PyList_New(0);
        if (!cells)
            goto failed;
        PyList_SET_ITEM(out, i, cells);
        uint64_t column, low, high;
        if (!IS_TUPLE_OF(query, 5) || as_number(PyTuple_GET_ITEM(query, 1), &column) ||
            as_number(PyTuple_GET_ITEM(query, 2), &low) || as_number(PyTuple_GET_ITEM(query, 3), &high) ||
            column > UINT32_MAX || !PyLong_Check(PyTuple_GET_ITEM(query, 4))) {
            back = 1;
            break;
        }
        if (any) {
            int skip = PySet_Contains(empty, PyTuple_GET_ITEM(query, 0));
            if (skip < 0)
                goto failed;
            if (skip)
                continue;
        }
        int64_t n = PyLong_AsLongLong(PyTuple_GET_ITEM(query, 4));
        if (n == -1 && PyErr_Occurred())
            goto failed;
        int group = group_of(self, PyTuple_GET_ITEM(query, 0));
        MDB_cursor *cursor = group < 0 ? NULL : cursor_of(self, group);
        if (!cursor) {
            back = 1;
            break;
        }
        put_tail(newest + prefix, (uint32_t)column, high);
        put_tail(oldest + prefix, (uint32_t)column, low);
        int rc = versions(cursor, newest, oldest, prefix + TAIL, n, cells);
        if (rc == -1 && PyErr_Occurred())
            goto failed;
        back = rc != 0;
    }
    if (back || args[3] != Py_True)
        end_view(self);
    if (!back)
        return out;
    Py_DECREF(out);
    Py_RETURN_NONE;
failed:
    end_view(self);
    Py_DECREF(out);
    return NULL;
}

/* ------------------------------------------------------------ a page of a scan (`scan_rows` in row.py) */

#define TS_MAX (((uint64_t)1 << 53) - 1)
#define PAST_MAX (KEY_MAX + 2) /* a prefix, and what `past_row` adds */

typedef struct {
    int group, values, n_columns; /* n_columns -1: all columns */
    uint32_t columns[64];
    uint64_t from, to;
    int64_t n;
} Query;

typedef struct {
    MDB_cursor *cursor;
    MDB_val at; /* the first key that has not been read */
    int more;
} Walk;

enum { BACK = 1 }; /* besides 0, and -1 with an exception: Python has to read the page */

static int
query_of(Environment *self, PyObject *given, Query *out)
{
    if (!IS_TUPLE_OF(given, 6))
        return BACK;
    PyObject *columns = PyTuple_GET_ITEM(given, 1);
    uint64_t n;
    out->group = group_of(self, PyTuple_GET_ITEM(given, 0));
    if (out->group < 0 || as_number(PyTuple_GET_ITEM(given, 2), &out->from) ||
        as_number(PyTuple_GET_ITEM(given, 3), &out->to) || as_number(PyTuple_GET_ITEM(given, 4), &n) || n > INT64_MAX)
        return BACK;
    out->n = (int64_t)n;
    out->values = PyObject_IsTrue(PyTuple_GET_ITEM(given, 5));
    out->n_columns = -1;
    if (columns == Py_None)
        return 0;
    if (!PyTuple_Check(columns) || PyTuple_GET_SIZE(columns) > 64)
        return BACK;
    out->n_columns = (int)PyTuple_GET_SIZE(columns);
    for (int i = 0; i < out->n_columns; i++) {
        uint64_t column;
        if (as_number(PyTuple_GET_ITEM(columns, i), &column) || column > UINT32_MAX)
            return BACK;
        out->columns[i] = (uint32_t)column;
    }
    return 0;
}

/* Add a cell to a row of the page, and its size to the page's. */
static int
add_scanned(PyObject *cells, const MDB_val *key, const MDB_val *value, int64_t *size)
{
    *size += value ? (int64_t)value->mv_size : 0;
    return add_cell(cells, key, value, 1);
}

/* Whether a key has a length that a cell's can have; on a damaged page, it may have any. */
static int
is_cells(const MDB_val *key)
{
    return key->mv_size >= TAIL + 2 && key->mv_size <= KEY_MAX;
}

/* Move a cursor to the first key at or after a key. Returns 0, BACK, or, at the end of the group, MDB_NOTFOUND. A search
   that stops at a smaller key is a sign of damage. */
static int
seek(MDB_cursor *cursor, const char *to, size_t size, MDB_val *key, MDB_val *value)
{
    key->mv_data = (void *)to;
    key->mv_size = size;
    int rc = mdb.cursor_get(cursor, key, value, MDB_SET_RANGE);
    if (rc)
        return rc == MDB_NOTFOUND ? rc : BACK;
    return !is_cells(key) || compare(key->mv_data, key->mv_size, to, size) < 0 ? BACK : 0;
}

static int
step(MDB_cursor *cursor, MDB_val *key, MDB_val *value)
{
    int rc = mdb.cursor_get(cursor, key, value, MDB_NEXT);
    if (rc)
        return rc == MDB_NOTFOUND ? rc : BACK;
    return is_cells(key) ? 0 : BACK;
}

static int
has_prefix(const MDB_val *key, const char *prefix, size_t size)
{
    return key->mv_size == size + TAIL && !memcmp(key->mv_data, prefix, size);
}

/* The cells of one row that a query asks for. */
static int
query_row(MDB_cursor *cursor, const Query *query, const char *prefix, size_t size, PyObject *cells, int64_t *bytes)
{
    char to[PAST_MAX];
    MDB_val key, value;
    memcpy(to, prefix, size);
    for (int i = 0; i < query->n_columns; i++) {
        char oldest[KEY_MAX];
        memcpy(oldest, prefix, size);
        put_tail(to + size, query->columns[i], query->to);
        put_tail(oldest + size, query->columns[i], query->from);
        int rc = query->n ? seek(cursor, to, size + TAIL, &key, &value) : MDB_NOTFOUND;
        for (int64_t left = query->n; !rc && compare(key.mv_data, key.mv_size, oldest, size + TAIL) <= 0;) {
            if (add_scanned(cells, &key, query->values ? &value : NULL, bytes))
                return -1;
            if (!--left)
                break;
            rc = step(cursor, &key, &value);
        }
        if (rc == BACK)
            return BACK;
    }
    if (query->n_columns >= 0)
        return 0;
    int rc = seek(cursor, prefix, size, &key, &value);
    for (int64_t left = query->n; !rc && left > 0 && has_prefix(&key, prefix, size);) {
        uint64_t ts = ts_of(&key);
        uint32_t column = column_of(&key);
        if (ts > query->to) {
            put_tail(to + size, column, query->to);
            rc = seek(cursor, to, size + TAIL, &key, &value);
        }
        else if (ts < query->from) {
            put_tail(to + size, column, 0);
            to[size + TAIL] = (char)0xff;
            rc = seek(cursor, to, size + TAIL + 1, &key, &value);
        }
        else {
            if (add_scanned(cells, &key, query->values ? &value : NULL, bytes))
                return -1;
            left--;
            rc = step(cursor, &key, &value);
        }
    }
    return rc == BACK ? BACK : 0;
}

/* Where the rows of a page are collected. */
typedef struct {
    PyObject *rows, *next; /* next: NULL at the end */
    int64_t rows_max, bytes_max, seeks_max, seeks, bytes;
    char stop[KEY_MAX];
    size_t stop_size; /* 0: none */
} Page;

static int
is_full(const Page *page)
{
    return PyList_GET_SIZE(page->rows) >= page->rows_max || page->bytes >= page->bytes_max ||
           page->seeks >= page->seeks_max;
}

/* Whether the page ends before the row with this prefix. Returns 0, 1, or -1: see `row_of`. */
static int
ends_before(Page *page, const char *prefix, size_t size)
{
    if (page->stop_size && compare(prefix, size, page->stop, page->stop_size) >= 0)
        return 1;
    if (!is_full(page))
        return 0;
    page->next = row_of(prefix, size);
    return page->next ? 1 : -1;
}

/* Add a row, and take over the reference to its cells. */
static int
add_row(Page *page, const char *prefix, size_t size, PyObject *cells)
{
    PyObject *row = row_of(prefix, size), *pair = row ? PyTuple_New(2) : NULL;
    if (!pair) {
        Py_XDECREF(row);
        Py_DECREF(cells);
        return -1;
    }
    PyTuple_SET_ITEM(pair, 0, row);
    PyTuple_SET_ITEM(pair, 1, cells);
    int rc = PyList_Append(page->rows, pair);
    Py_DECREF(pair);
    return rc;
}

/* `_scan_group` in row.py: one pass, without a seek for every row. */
static int
scan_group(MDB_cursor *cursor, const Query *query, const char *start, size_t start_size, Page *page)
{
    char prefix[PAST_MAX];
    MDB_val key, value;
    int rc = seek(cursor, start, start_size, &key, &value);
    while (!rc) {
        size_t size = key.mv_size - TAIL;
        memcpy(prefix, key.mv_data, size);
        int ends = ends_before(page, prefix, size);
        if (ends)
            return ends < 0 ? BACK : 0;
        PyObject *cells = PyList_New(0), *lists = cells ? PyList_New(1) : NULL;
        if (!lists) {
            Py_XDECREF(cells);
            return -1;
        }
        PyList_SET_ITEM(lists, 0, cells);
        while (!rc && has_prefix(&key, prefix, size)) {
            if (PyList_GET_SIZE(cells) == query->n) {
                memset(prefix + size, 0xff, TAIL + 1);
                rc = seek(cursor, prefix, size + TAIL + 1, &key, &value);
                break;
            }
            page->seeks++;
            if (add_scanned(cells, &key, query->values ? &value : NULL, &page->bytes)) {
                Py_DECREF(lists);
                return -1;
            }
            rc = step(cursor, &key, &value);
        }
        if (rc == BACK || add_row(page, prefix, size, lists)) {
            if (rc == BACK)
                Py_DECREF(lists);
            return BACK;
        }
    }
    return rc == BACK ? BACK : 0;
}

/* `_Forward` in row.py: the next row is the smallest at which any cursor is. */
static int
scan_groups(const Query *queries, int n, Walk *walks, int groups, const char *start, size_t start_size, Page *page)
{
    char prefix[PAST_MAX];
    MDB_val value;
    int64_t seeks = 1;
    for (int q = 0; q < n; q++)
        seeks += queries[q].n_columns < 0 ? 1 : queries[q].n_columns;
    for (int g = 0; g < groups; g++) {
        if (!walks[g].cursor)
            continue;
        int rc = seek(walks[g].cursor, start, start_size, &walks[g].at, &value);
        if (rc == BACK)
            return BACK;
        walks[g].more = !rc;
    }
    for (;;) {
        const MDB_val *least = NULL;
        for (int g = 0; g < groups; g++)
            if (walks[g].more && (!least || compare(walks[g].at.mv_data, walks[g].at.mv_size, least->mv_data,
                                                    least->mv_size) < 0))
                least = &walks[g].at;
        if (!least)
            return 0;
        size_t size = least->mv_size - TAIL;
        memcpy(prefix, least->mv_data, size);
        int ends = ends_before(page, prefix, size);
        if (ends)
            return ends < 0 ? BACK : 0;
        PyObject *lists = PyList_New(n);
        int any = 0, rc = lists ? 0 : -1;
        for (int q = 0; q < n && !rc; q++) {
            PyObject *cells = PyList_New(0);
            if (!cells) {
                rc = -1;
                break;
            }
            PyList_SET_ITEM(lists, q, cells);
            Walk *walk = &walks[queries[q].group];
            if (walk->more && has_prefix(&walk->at, prefix, size))
                rc = query_row(walk->cursor, &queries[q], prefix, size, cells, &page->bytes);
            any |= PyList_GET_SIZE(cells) > 0;
        }
        if (rc || !any)
            Py_XDECREF(lists);
        else
            rc = add_row(page, prefix, size, lists);
        if (rc)
            return PyErr_Occurred() ? -1 : BACK;
        page->seeks += seeks;
        memset(prefix + size, 0xff, TAIL + 1);
        for (int g = 0; g < groups; g++)
            if (walks[g].more && has_prefix(&walks[g].at, prefix, size)) {
                rc = seek(walks[g].cursor, prefix, size + TAIL + 1, &walks[g].at, &value);
                if (rc == BACK)
                    return BACK;
                walks[g].more = !rc;
            }
    }
}

#define QUERIES_MAX 16

/* scan(start, stop, queries, rows_max, bytes_max, seeks_max) -> (rows, next), or None: Python has to read the page. */
PyObject *
Environment_scan(Environment *self, PyObject *args)
{
    PyObject *start, *stop, *given;
    Page page = {0};
    Query queries[QUERIES_MAX];
    Walk walks[GROUPS_MAX];
    char from[KEY_MAX];
    size_t size;
    long long rows_max, bytes_max, seeks_max;
    if (!PyArg_ParseTuple(args, "SOO!LLL", &start, &stop, &PyTuple_Type, &given, &rows_max, &bytes_max, &seeks_max))
        return NULL;
    int n = (int)PyTuple_GET_SIZE(given), rc = n > QUERIES_MAX ? BACK : 0;
    if (!(size = prefix_of(start, from)) ||
        (stop != Py_None && (!PyBytes_Check(stop) || !(page.stop_size = prefix_of(stop, page.stop)))))
        rc = BACK;
    for (int q = 0; q < n && !rc; q++)
        rc = query_of(self, PyTuple_GET_ITEM(given, q), &queries[q]);
    if (rc)
        Py_RETURN_NONE;
    page.rows_max = rows_max;
    page.bytes_max = bytes_max;
    page.seeks_max = seeks_max;
    if (!(page.rows = PyList_New(0)))
        return NULL;
    end_view(self); /* a page is read from the newest state */
    memset(walks, 0, sizeof walks);
    for (int q = 0; q < n && !rc; q++)
        if (!(walks[queries[q].group].cursor = cursor_of(self, queries[q].group)))
            rc = BACK;
    if (!rc && n == 1 && queries[0].n_columns < 0 && !queries[0].from && queries[0].to == TS_MAX)
        rc = scan_group(walks[queries[0].group].cursor, &queries[0], from, size, &page);
    else if (!rc)
        rc = scan_groups(queries, n, walks, self->groups, from, size, &page);
    end_view(self);
    if (rc) {
        PyErr_Clear(); /* out of memory, or a row that cannot be decoded: Python says so */
        Py_DECREF(page.rows);
        Py_XDECREF(page.next);
        Py_RETURN_NONE;
    }
    if (!page.next) {
        page.next = Py_None;
        Py_INCREF(Py_None);
    }
    return Py_BuildValue("(NN)", page.rows, page.next);
}

/* ------------------------------------------------------------ a page of a log (`_scan_log` in row.py) */

/* Add the cell of an entry, whose key is given, and, if n is above 1, its column's newest older one. */
static int
logged_cells(MDB_cursor *records, const char *at, size_t size, int64_t n, PyObject *cells, int64_t *bytes)
{
    MDB_val key = {size, (void *)at}, value;
    int rc = n ? mdb.cursor_get(records, &key, &value, MDB_SET_RANGE) : MDB_NOTFOUND;
    if (rc && rc != MDB_NOTFOUND)
        return BACK;
    if (rc || compare(key.mv_data, key.mv_size, at, size)) {
        MDB_val entry = {size, (void *)at};
        return add_cell(cells, &entry, &(MDB_val){0, ""}, 1);
    }
    if (add_scanned(cells, &key, &value, bytes))
        return -1;
    if (n < 2)
        return 0;
    rc = step(records, &key, &value);
    if (!rc && key.mv_size == size && !memcmp(key.mv_data, at, size - 8))
        return add_scanned(cells, &key, &value, bytes);
    return rc == BACK ? BACK : 0;
}

/* scan_log(after, from_ts, to_ts, n, rows_max, bytes_max) -> rows, or None: Python has to read the page. */
PyObject *
Environment_scan_log(Environment *self, PyObject *args)
{
    PyObject *after, *given[5];
    uint64_t numbers[5];
    char from[KEY_MAX + 1];
    int64_t bytes = 0;
    if (!PyArg_ParseTuple(args, "SOOOOO", &after, &given[0], &given[1], &given[2], &given[3], &given[4]))
        return NULL;
    size_t after_size = (size_t)PyBytes_GET_SIZE(after);
    if (self->log < 0 || self->write < 0 || after_size >= KEY_MAX)
        Py_RETURN_NONE;
    for (int i = 0; i < 5; i++)
        if (as_number(given[i], &numbers[i]) || numbers[i] > INT64_MAX)
            Py_RETURN_NONE;
    uint64_t low = numbers[0], high = numbers[1];
    int64_t n = (int64_t)numbers[2], rows_max = (int64_t)numbers[3], bytes_max = (int64_t)numbers[4];
    /* An entry's key is its timestamp, the prefix of its row, and its column; no key is equal to `from`. */
    uint64_t first = __builtin_bswap64(low);
    size_t size = after_size + 1;
    memcpy(from, PyBytes_AS_STRING(after), after_size);
    from[after_size] = 0;
    if (compare(from, size, &first, 8) < 0) {
        memcpy(from, &first, 8);
        size = 8;
    }
    PyObject *rows = PyList_New(0);
    if (!rows)
        return NULL;
    end_view(self); /* a page is read from the newest state */
    MDB_cursor *log = cursor_of(self, self->log), *records = log ? cursor_of(self, self->write) : NULL;
    int rc = records ? 0 : BACK;
    MDB_val key = {size, from}, unused;
    if (!rc)
        rc = mdb.cursor_get(log, &key, &unused, MDB_SET_RANGE);
    while (!rc && PyList_GET_SIZE(rows) < rows_max && bytes < bytes_max) {
        char at[KEY_MAX];
        uint64_t ts;
        if (!is_cells(&key)) {
            rc = BACK;
            break;
        }
        memcpy(&ts, key.mv_data, 8);
        ts = __builtin_bswap64(ts);
        if (ts > high)
            break;
        size_t where = key.mv_size - 8; /* prefix and column: of an entry first its timestamp, of a cell last */
        memcpy(at, (char *)key.mv_data + 8, where);
        uint64_t tail = __builtin_bswap64(~ts);
        memcpy(at + where, &tail, 8);
        PyObject *cells = PyList_New(0), *lists = cells ? PyList_New(1) : NULL;
        PyObject *row = lists ? row_of(at, where - 4) : NULL, *pair = row ? PyTuple_New(2) : NULL;
        if (!pair) {
            if (lists)
                Py_DECREF(lists);
            Py_XDECREF(cells);
            Py_XDECREF(row);
            rc = BACK;
            break;
        }
        PyList_SET_ITEM(lists, 0, cells);
        PyTuple_SET_ITEM(pair, 0, row);
        PyTuple_SET_ITEM(pair, 1, lists);
        rc = logged_cells(records, at, where + 8, n, cells, &bytes);
        if (!rc)
            rc = PyList_Append(rows, pair);
        Py_DECREF(pair);
        if (!rc)
            rc = mdb.cursor_get(log, &key, &unused, MDB_NEXT);
    }
    end_view(self);
    if (!rc || rc == MDB_NOTFOUND)
        return rows;
    PyErr_Clear(); /* out of memory, or damage: Python says so */
    Py_DECREF(rows);
    Py_RETURN_NONE;
}
