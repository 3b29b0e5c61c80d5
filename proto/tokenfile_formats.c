/* Headers of llm.c's shards and Megatron's index, checked against the files they describe. */
#include "proto/tokenfile_formats.h"

#include <string.h>
#include <unistd.h>

static uint64_t little_endian(const uint8_t *p, int bytes)
{
    uint64_t x = 0;
    for (int i = 0; i < bytes; i++)
        x |= (uint64_t)p[i] << 8 * i;
    return x;
}

static int32_t get_i32(const uint8_t *p)
{
    return (int32_t)(uint32_t)little_endian(p, 4);
}

static int64_t get_i64(const uint8_t *p)
{
    return (int64_t)little_endian(p, 8);
}

/* ---- llm.c --------------------------------------------------------------------- */

enum { LLMC_HEADER = 256 * 4, LLMC_EVALUATION = 20240522 };

int tokenfile_llmc(struct token_file *f, struct error *err)
{
    static const struct {
        int32_t magic, version;
        int token_bytes;
    } kinds[] = {{20240520, 1, 2}, {20240801, 7, 4}};
    uint8_t header[12];
    if (f->bytes < LLMC_HEADER) {
        error_set(err, ERR_INVALID, "%s: %lld bytes are fewer than the %d of an llm.c header", f->path,
                  (long long)f->bytes, LLMC_HEADER);
        return error_hint(err, "the file is cut short, or data.format is not its format");
    }
    int rc = tokenfile_read(f->fd, f->path, header, sizeof header, 0, err);
    if (rc)
        return rc;
    int32_t magic = get_i32(header), version = get_i32(header + 4), count = get_i32(header + 8);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (magic == kinds[i].magic && version == kinds[i].version)
            f->token_bytes = kinds[i].token_bytes;
    if (magic == LLMC_EVALUATION) {
        error_set(err, ERR_UNSUPPORTED, "%s holds multiple-choice questions of llm.c, not a stream of tokens", f->path);
        return error_hint(err, "name a shard of tokens");
    }
    if (!f->token_bytes) {
        error_set(err, ERR_INVALID,
                  "%s: magic %d at byte 0 with version %d at byte 4 is not that of an llm.c shard (20240520 with 1 or "
                  "20240801 with 7)",
                  f->path, magic, version);
        return error_hint(err, "set data.format: U16 or U32 for ids without a header; MEGATRON needs its .idx beside");
    }
    int64_t need = LLMC_HEADER + (int64_t)count * f->token_bytes;
    if (count < 0 || need != f->bytes) {
        error_set(err, ERR_INVALID,
                  "%s ends at byte %lld, and the %d tokens that its header tells of at byte 8 end at %lld", f->path,
                  (long long)f->bytes, count, (long long)need);
        return error_hint(err, "write or copy the shard again");
    }
    f->start = LLMC_HEADER;
    f->tokens = count;
    return ERR_OK;
}

/* ---- Megatron ------------------------------------------------------------------ */

enum { INDEX_HEADER = 34, INDEX_CHUNK = 2048 };
static const char index_magic[9] = "MMIDIDX\0";

struct token_index {
    const char *path;
    int fd;
    int64_t bytes;
    int64_t sequences, marks;
    int64_t lengths_at, offsets_at, marks_at; /* bytes of the index */
};

static int broken(struct error *err)
{
    return error_hint(err, "make .bin and .idx again, or copy both of one run");
}

static int id_type(struct token_file *f, const struct token_index *x, int code, struct error *err)
{
    static const char *const names[] = {"?", "u8", "i8", "i16", "i32", "i64", "f64", "f32", "u16"};
    enum { U8 = 1, I32 = 4, U16 = 8, CODES = sizeof names / sizeof names[0] };
    f->token_bytes = code == U8 ? 1 : code == U16 ? 2 : code == I32 ? 4 : 0;
    f->is_signed = code == I32;
    if (f->token_bytes)
        return ERR_OK;
    error_set(err, ERR_UNSUPPORTED, "%s: ids of type %d (%s) at byte 17; u8, u16 and i32 are read", x->path, code,
              code > 0 && code < CODES ? names[code] : "unknown");
    return error_hint(err, "make the files again with ids of type uint16 or int32");
}

static int index_header(struct token_file *f, struct token_index *x, struct error *err)
{
    uint8_t h[INDEX_HEADER];
    if (x->bytes < INDEX_HEADER) {
        error_set(err, ERR_INVALID, "%s ends at byte %lld, within its header of %d bytes", x->path, (long long)x->bytes,
                  INDEX_HEADER);
        return broken(err);
    }
    int rc = tokenfile_read(x->fd, x->path, h, sizeof h, 0, err);
    if (rc)
        return rc;
    uint64_t version = little_endian(h + 9, 8), sequences = little_endian(h + 18, 8), marks = little_endian(h + 26, 8);
    if (memcmp(h, index_magic, sizeof index_magic) || version != 1) {
        error_set(err, ERR_INVALID, "%s does not begin with MMIDIDX and version 1 (byte 9): not an index of Megatron",
                  x->path);
        return error_hint(err, "set data.format to what the file is, or make .bin and .idx again");
    }
    rc = id_type(f, x, h[17], err);
    if (rc)
        return rc;
    uint64_t room = (uint64_t)(x->bytes - INDEX_HEADER);
    bool fits = sequences <= room / 12 && marks <= room / 8;
    uint64_t need = fits ? sequences * 12 + marks * 8 : 0;
    if (fits && sequences && need + sequences == room) {
        error_set(err, ERR_UNSUPPORTED, "%s has a mode a sequence, as multimodal data does; that is not read", x->path);
        return error_hint(err, "make the files again without modes");
    }
    if (!fits || need != room) {
        error_set(
            err, ERR_INVALID,
            "%s ends at byte %lld, which is not where its %llu sequences and %llu document marks (bytes 18, 26) end",
            x->path, (long long)x->bytes, (unsigned long long)sequences, (unsigned long long)marks);
        return broken(err);
    }
    x->sequences = (int64_t)sequences;
    x->marks = (int64_t)marks;
    x->lengths_at = INDEX_HEADER;
    x->offsets_at = x->lengths_at + 4 * x->sequences;
    x->marks_at = x->offsets_at + 8 * x->sequences;
    return ERR_OK;
}

/* Sequences lie in the data file one behind the other, from its first byte to its last. */
static int check_sequences(const struct token_file *f, const struct token_index *x, struct error *err)
{
    uint8_t lengths[INDEX_CHUNK * 4], offsets[INDEX_CHUNK * 8];
    int64_t end = 0;
    for (int64_t first = 0; first < x->sequences; first += INDEX_CHUNK) {
        int64_t n = x->sequences - first < INDEX_CHUNK ? x->sequences - first : INDEX_CHUNK;
        int rc = tokenfile_read(x->fd, x->path, lengths, (size_t)n * 4, x->lengths_at + first * 4, err);
        if (!rc)
            rc = tokenfile_read(x->fd, x->path, offsets, (size_t)n * 8, x->offsets_at + first * 8, err);
        if (rc)
            return rc;
        for (int64_t i = 0; i < n; i++) {
            int64_t length = get_i32(lengths + i * 4), offset = get_i64(offsets + i * 8);
            if (length < 0) {
                error_set(err, ERR_INVALID, "%s: sequence %lld has %lld tokens (byte %lld)", x->path,
                          (long long)(first + i), (long long)length, (long long)(x->lengths_at + (first + i) * 4));
                return broken(err);
            }
            if (offset != end) {
                error_set(err, ERR_INVALID,
                          "%s: sequence %lld begins at byte %lld of the data (byte %lld here), and the one before it "
                          "ends at %lld",
                          x->path, (long long)(first + i), (long long)offset,
                          (long long)(x->offsets_at + (first + i) * 8), (long long)end);
                return broken(err);
            }
            end += length * f->token_bytes;
            if (end > f->bytes) {
                error_set(err, ERR_INVALID, "%s ends at byte %lld, within sequence %lld of %s, which ends at %lld",
                          f->path, (long long)f->bytes, (long long)(first + i), x->path, (long long)end);
                return broken(err);
            }
        }
    }
    if (end != f->bytes) {
        error_set(err, ERR_INVALID, "%s ends at byte %lld, and the sequences of %s at %lld", f->path,
                  (long long)f->bytes, x->path, (long long)end);
        return broken(err);
    }
    return ERR_OK;
}

/* Nothing is made of the marks (documents are told by eod_id), but a wrong one tells of a damaged file. */
static int check_marks(const struct token_index *x, struct error *err)
{
    uint8_t marks[INDEX_CHUNK * 8];
    int64_t last = 0;
    for (int64_t first = 0; first < x->marks; first += INDEX_CHUNK) {
        int64_t n = x->marks - first < INDEX_CHUNK ? x->marks - first : INDEX_CHUNK;
        int rc = tokenfile_read(x->fd, x->path, marks, (size_t)n * 8, x->marks_at + first * 8, err);
        if (rc)
            return rc;
        for (int64_t i = 0; i < n; i++) {
            int64_t mark = get_i64(marks + i * 8);
            if (mark < last || mark > x->sequences) {
                error_set(
                    err, ERR_INVALID,
                    "%s: document mark %lld is %lld (byte %lld), not from the one before it to the %lld sequences",
                    x->path, (long long)(first + i), (long long)mark, (long long)(x->marks_at + (first + i) * 8),
                    (long long)x->sequences);
                return broken(err);
            }
            last = mark;
        }
    }
    return ERR_OK;
}

int tokenfile_megatron(struct token_file *f, const char *index_path, struct error *err)
{
    struct token_index x = {.path = index_path, .fd = -1};
    int rc = tokenfile_open_regular(index_path, &x.fd, &x.bytes, err);
    if (rc)
        return error_context(err, "index of %s", f->path);
    rc = index_header(f, &x, err);
    if (!rc)
        rc = check_sequences(f, &x, err);
    if (!rc)
        rc = check_marks(&x, err);
    close(x.fd);
    f->tokens = rc ? 0 : f->bytes / f->token_bytes;
    return rc;
}
