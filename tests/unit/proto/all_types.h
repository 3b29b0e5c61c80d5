/* A message with every protobuf type, which no schema of ours has: descriptors
 * written by hand, equal to what protoc-c makes of
 *
 *   message AllTypes {
 *     enum Choice { ZERO = 0; ONE = 1; MINUS = -3; }
 *     optional int32 i32 = 1;     optional sint32 s32 = 2;    optional sfixed32 sf32 = 3;
 *     optional int64 i64 = 4;     optional sint64 s64 = 5;    optional sfixed64 sf64 = 6;
 *     optional uint32 u32 = 7;    optional fixed32 f32 = 8;
 *     optional uint64 u64 = 9;    optional fixed64 f64 = 10;
 *     optional float real = 11;   optional double wide = 12;
 *     optional bool flag = 13;    optional Choice choice = 14;
 *     optional string text = 15;  optional bytes raw = 16;
 *     optional AllTypes sub = 17;
 *     repeated int32 list_i32 = 18;      repeated float list_real = 19;  repeated string list_text = 20;
 *     repeated bytes list_raw = 21;      repeated Choice list_choice = 22;  repeated AllTypes list_sub = 23;
 *     repeated bool list_flag = 24;
 *     oneof pick { int32 pick_number = 25; string pick_text = 26; AllTypes pick_sub = 27; }
 *   }
 */
#ifndef BOOST_TESTS_ALL_TYPES_H
#define BOOST_TESTS_ALL_TYPES_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>

enum choice { CHOICE_MINUS = -3, CHOICE_ZERO = 0, CHOICE_ONE = 1 };

struct all_types {
    ProtobufCMessage base;
    protobuf_c_boolean has[17]; /* by field number; strings and messages use none */
    int32_t i32, s32, sf32;
    int64_t i64, s64, sf64;
    uint32_t u32, f32;
    uint64_t u64, f64;
    float real;
    double wide;
    protobuf_c_boolean flag;
    enum choice choice;
    char *text;
    ProtobufCBinaryData raw;
    struct all_types *sub;
    size_t n_list[7];
    int32_t *list_i32;
    float *list_real;
    char **list_text;
    ProtobufCBinaryData *list_raw;
    enum choice *list_choice;
    struct all_types **list_sub;
    protobuf_c_boolean *list_flag;
    uint32_t pick_case;
    union {
        int32_t pick_number;
        char *pick_text;
        struct all_types *pick_sub;
    };
};

static const ProtobufCEnumValue choice_values[] = {
    {"MINUS", "CHOICE_MINUS", -3}, {"ZERO", "CHOICE_ZERO", 0}, {"ONE", "CHOICE_ONE", 1}};
static const ProtobufCEnumValueIndex choice_names[] = {{"MINUS", 0}, {"ONE", 2}, {"ZERO", 1}};
static const ProtobufCIntRange choice_ranges[] = {{-3, 0}, {0, 1}, {0, 3}};
static const ProtobufCEnumDescriptor choice_descriptor = {PROTOBUF_C__ENUM_DESCRIPTOR_MAGIC,
                                                          "AllTypes.Choice",
                                                          "Choice",
                                                          "enum choice",
                                                          "",
                                                          3,
                                                          choice_values,
                                                          3,
                                                          choice_names,
                                                          2,
                                                          choice_ranges,
                                                          NULL,
                                                          NULL,
                                                          NULL,
                                                          NULL};

static const ProtobufCMessageDescriptor all_types_descriptor;

#define SINGLE(name, id, kind, type)                                                                \
    {                                                                                               \
#name, id, PROTOBUF_C_LABEL_OPTIONAL, PROTOBUF_C_TYPE_##kind,                               \
            offsetof(struct all_types, has) + ((id) <= 16 ? (id) : 0) * sizeof(protobuf_c_boolean), \
            offsetof(struct all_types, name), type, NULL, 0, 0, NULL, NULL                          \
    }
#define LIST(name, id, kind, type)                                                                                   \
    {                                                                                                                \
#name, id, PROTOBUF_C_LABEL_REPEATED, PROTOBUF_C_TYPE_##kind,                                                \
            offsetof(struct all_types, n_list) + ((id)-18) * sizeof(size_t), offsetof(struct all_types, name), type, \
            NULL, 0, 0, NULL, NULL                                                                                   \
    }
#define PICK(name, id, kind, type)                                                                           \
    {                                                                                                        \
#name, id, PROTOBUF_C_LABEL_OPTIONAL, PROTOBUF_C_TYPE_##kind, offsetof(struct all_types, pick_case), \
            offsetof(struct all_types, name), type, NULL, PROTOBUF_C_FIELD_FLAG_ONEOF, 0, NULL, NULL         \
    }

static const ProtobufCFieldDescriptor all_types_fields[] = {
    SINGLE(i32, 1, INT32, NULL),
    SINGLE(s32, 2, SINT32, NULL),
    SINGLE(sf32, 3, SFIXED32, NULL),
    SINGLE(i64, 4, INT64, NULL),
    SINGLE(s64, 5, SINT64, NULL),
    SINGLE(sf64, 6, SFIXED64, NULL),
    SINGLE(u32, 7, UINT32, NULL),
    SINGLE(f32, 8, FIXED32, NULL),
    SINGLE(u64, 9, UINT64, NULL),
    SINGLE(f64, 10, FIXED64, NULL),
    SINGLE(real, 11, FLOAT, NULL),
    SINGLE(wide, 12, DOUBLE, NULL),
    SINGLE(flag, 13, BOOL, NULL),
    SINGLE(choice, 14, ENUM, &choice_descriptor),
    SINGLE(text, 15, STRING, NULL),
    SINGLE(raw, 16, BYTES, NULL),
    SINGLE(sub, 17, MESSAGE, &all_types_descriptor),
    LIST(list_i32, 18, INT32, NULL),
    LIST(list_real, 19, FLOAT, NULL),
    LIST(list_text, 20, STRING, NULL),
    LIST(list_raw, 21, BYTES, NULL),
    LIST(list_choice, 22, ENUM, &choice_descriptor),
    LIST(list_sub, 23, MESSAGE, &all_types_descriptor),
    LIST(list_flag, 24, BOOL, NULL),
    PICK(pick_number, 25, INT32, NULL),
    PICK(pick_text, 26, STRING, NULL),
    PICK(pick_sub, 27, MESSAGE, &all_types_descriptor),
};
/* protobuf-c looks names up in this order; nothing here does. */
static const unsigned all_types_by_name[27];
static const ProtobufCIntRange all_types_ranges[] = {{1, 0}, {0, 27}};

static void all_types_init(ProtobufCMessage *m)
{
    struct all_types *fresh = (struct all_types *)m;
    *fresh = (struct all_types){.base = {&all_types_descriptor, 0, NULL}};
}

static const ProtobufCMessageDescriptor all_types_descriptor = {PROTOBUF_C__MESSAGE_DESCRIPTOR_MAGIC,
                                                                "AllTypes",
                                                                "AllTypes",
                                                                "struct all_types",
                                                                "",
                                                                sizeof(struct all_types),
                                                                27,
                                                                all_types_fields,
                                                                all_types_by_name,
                                                                1,
                                                                all_types_ranges,
                                                                all_types_init,
                                                                NULL,
                                                                NULL,
                                                                NULL};

#undef SINGLE
#undef LIST
#undef PICK

#endif
