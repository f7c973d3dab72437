/* The hot path of an LMDB environment, outside the interpreter (perco/storage/lmdb_native.py says when it is used).

   environment.c   Environment: an environment that py-lmdb has opened
   reading.c       reads of rows, and pages of scans and logs, in an Environment
   writing.c       batches of mutations; Writer: the loop of a writer's thread; Completions: what writers have done
   leaves.c        columns of write records, made from the pages of a file without LMDB

   There is one copy of LMDB in the process: its functions are those that py-lmdb's shared object exports. The
   environment is py-lmdb's, too; `find_env` says how it is found and verified.

   Everything unusual goes back to Python, which does it again from the beginning: the functions that read return None,
   and `Writer.get` returns the batch. Until then, nothing was written. The exception is a commit that failed: what is on
   the disk is then unknown, and Python gets LMDB's error.

   Objects are used with the GIL held, unless a comment says otherwise. */

#ifndef PERCO_NATIVE_H
#define PERCO_NATIVE_H

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_SIZE_T__ < 8
#error "the extension is written for machines of 64 bits, little-endian; elsewhere perco does without it"
#endif

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ------------------------------------------------------------ LMDB's public interface, as far as it is used */

typedef struct MDB_env MDB_env;
typedef struct MDB_txn MDB_txn;
typedef struct MDB_cursor MDB_cursor;
typedef unsigned int MDB_dbi;
typedef struct { size_t mv_size; void *mv_data; } MDB_val;
typedef struct { unsigned int psize, depth; size_t branch, leaf, overflow, entries; } MDB_stat;
typedef struct { void *address; size_t mapsize, last_pgno, last_txnid; unsigned int maxreaders, numreaders; } MDB_envinfo;
enum { MDB_LAST = 6, MDB_NEXT = 8, MDB_PREV = 12, MDB_SET_RANGE = 17 };
enum { MDB_NOTFOUND = -30798, MDB_NOTLS = 0x200000, MDB_RDONLY = 0x20000 };

struct lmdb {
    int (*env_get_path)(MDB_env *, const char **);
    int (*env_get_fd)(MDB_env *, int *);
    int (*env_get_flags)(MDB_env *, unsigned *);
    int (*env_stat)(MDB_env *, MDB_stat *);
    int (*env_info)(MDB_env *, MDB_envinfo *);
    int (*txn_begin)(MDB_env *, MDB_txn *, unsigned, MDB_txn **);
    size_t (*txn_id)(MDB_txn *);
    int (*txn_commit)(MDB_txn *);
    void (*txn_abort)(MDB_txn *);
    void (*txn_reset)(MDB_txn *);
    int (*txn_renew)(MDB_txn *);
    int (*dbi_open)(MDB_txn *, const char *, unsigned, MDB_dbi *);
    int (*get)(MDB_txn *, MDB_dbi, MDB_val *, MDB_val *);
    int (*put)(MDB_txn *, MDB_dbi, MDB_val *, MDB_val *, unsigned);
    int (*del)(MDB_txn *, MDB_dbi, MDB_val *, MDB_val *);
    int (*cursor_open)(MDB_txn *, MDB_dbi, MDB_cursor **);
    void (*cursor_close)(MDB_cursor *);
    int (*cursor_renew)(MDB_txn *, MDB_cursor *);
    int (*cursor_get)(MDB_cursor *, MDB_val *, MDB_val *, int);
    char *(*strerror)(int);
};

extern struct lmdb mdb;

/* ------------------------------------------------------------ Python's side of it, set by `use` */

extern PyObject *Unverified;                   /* an exception: this py-lmdb, or this environment, cannot be used */
extern PyObject *applied, *refused;            /* APPLIED, Refused (cells.py) */
extern PyObject *py_escape, *py_unescape;      /* escape, unescape (keys.py) */

/* ------------------------------------------------------------ an environment */

#define GROUPS_MAX 160
#define KEY_MAX 511 /* LMDB's longest key */
#define TAIL 12     /* of a cell's key: column and timestamp */

typedef struct {
    PyObject_HEAD
    MDB_env *env;    /* NULL: closed */
    PyObject *owner; /* py-lmdb's environment */
    size_t page;
    int groups, log, write; /* how many; the index of the log (E1), and of the records, or -1 */
    PyObject *names[GROUPS_MAX];
    MDB_dbi dbis[GROUPS_MAX], main;
    MDB_txn *view; /* kept from read to read: in between it is reset, and pins nothing (S3) */
    int open;      /* the view is not reset */
    MDB_cursor *cursors[GROUPS_MAX];
    char fresh[GROUPS_MAX]; /* the cursor is that of the open view */
    char epoch[8];
    int fenced;       /* whether there is an epoch to compare (F1) */
    Py_ssize_t limit; /* bytes of the file that batches may use: they are allocated, and within the map (S4) */
} Environment;

int load_lmdb(void *library, const char *prefix);
int group_of(Environment *self, PyObject *name);
MDB_cursor *cursor_of(Environment *self, int group);
void end_view(Environment *self);
extern PyTypeObject EnvironmentType, WriterType, CompletionsType;
PyObject *Environment_read(Environment *self, PyObject *const *args, Py_ssize_t count);
PyObject *Environment_scan(Environment *self, PyObject *args);
PyObject *Environment_scan_log(Environment *self, PyObject *args);
PyObject *Environment_apply(Environment *self, PyObject *args);
PyObject *leaf_columns(PyObject *self, PyObject *args);
PyObject *leaf_pages(PyObject *self, PyObject *args);
extern PyObject *api; /* the address of py-lmdb's table of the functions of LMDB 0.9; None: it has only these */

/* ------------------------------------------------------------ keys (keys.py) */

size_t prefix_of(PyObject *row, char *out); /* `out`: KEY_MAX bytes */
PyObject *row_of(const char *prefix, size_t size);

static inline void
put_tail(char *out, uint32_t column, uint64_t ts)
{
    uint32_t c = __builtin_bswap32(column);
    uint64_t t = __builtin_bswap64(~ts);
    memcpy(out, &c, 4);
    memcpy(out + 4, &t, 8);
}

static inline uint64_t
ts_of(const MDB_val *key)
{
    uint64_t t;
    memcpy(&t, (char *)key->mv_data + key->mv_size - 8, 8);
    return ~__builtin_bswap64(t);
}

static inline uint32_t
column_of(const MDB_val *key)
{
    uint32_t c;
    memcpy(&c, (char *)key->mv_data + key->mv_size - TAIL, 4);
    return __builtin_bswap32(c);
}

static inline int
compare(const void *a, size_t a_size, const void *b, size_t b_size)
{
    int c = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return c ? c : (a_size > b_size) - (a_size < b_size);
}

/* ------------------------------------------------------------ what Python gives */

/* A whole number within 64 bits that is not negative. Returns -1, without an exception, for anything else. */
static inline int
as_number(PyObject *object, uint64_t *out)
{
    if (!PyLong_Check(object))
        return -1;
    *out = PyLong_AsUnsignedLongLong(object);
    if (*out == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return -1;
    }
    return 0;
}

#define IS_SEQUENCE(o) (PyTuple_Check(o) || PyList_Check(o))
#define SIZE(o) (PyTuple_Check(o) ? PyTuple_GET_SIZE(o) : PyList_GET_SIZE(o))
#define ITEM(o, i) (PyTuple_Check(o) ? PyTuple_GET_ITEM(o, i) : PyList_GET_ITEM(o, i))
#define IS_TUPLE_OF(o, n) (PyTuple_Check(o) && PyTuple_GET_SIZE(o) == (n))

#endif
