# time limit: 120
"""The text format against the real protoc: what protoc reads we read to the same
bytes, what it refuses we refuse, and what either writes the other reads back.

Uses the converter inside tests/unit/proto/roundtrip_test.c. Skips itself when
protoc is not installed (the build only needs protoc-c)."""
import os, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(os.environ.get("BOOST_ROOT", Path(__file__).resolve().parents[2]))
TOOL = Path(os.environ.get("BOOST_BIN", ROOT / "build/bin")).parent / "tests/proto/roundtrip_test"

ALL_TYPES = """syntax = "proto2";
message AllTypes {
  enum Choice { ZERO = 0; ONE = 1; MINUS = -3; }
  optional int32 i32 = 1; optional sint32 s32 = 2; optional sfixed32 sf32 = 3;
  optional int64 i64 = 4; optional sint64 s64 = 5; optional sfixed64 sf64 = 6;
  optional uint32 u32 = 7; optional fixed32 f32 = 8; optional uint64 u64 = 9; optional fixed64 f64 = 10;
  optional float real = 11; optional double wide = 12; optional bool flag = 13; optional Choice choice = 14;
  optional string text = 15; optional bytes raw = 16; optional AllTypes sub = 17;
  repeated int32 list_i32 = 18; repeated float list_real = 19; repeated string list_text = 20;
  repeated bytes list_raw = 21; repeated Choice list_choice = 22; repeated AllTypes list_sub = 23;
  repeated bool list_flag = 24;
  oneof pick { int32 pick_number = 25; string pick_text = 26; AllTypes pick_sub = 27; }
}
"""

# Text of a JobSpec.
JOB_CASES = [
    '', '# only a comment', 'name:"a"', "name:'a'", 'name : "a" ;', 'name:"a",priority:1', 'name:"a";;', ';', ',',
    'name:"a" name:"b"', 'model{hidden:1} model{layers:2}', 'model{}', 'model<>', 'model:{}', 'model:<hidden:1>',
    'model<hidden:1}', 'model{hidden:1>', 'model{', 'model{}}', 'model', 'model:', 'model 3', 'model "x"',
    'model[{}]', 'model{hidden:1},', 'model{hidden:1},;', 'model{hidden:1;layers:2,heads:3}',
    'name:"\\n\\t\\r\\a\\b\\f\\v\\\\\\\'\\"\\?"', 'name:"\\1\\12\\123\\1234"', 'name:"\\x4\\x41\\x414"',
    'name:"\\X41"', 'name:"\\x"', 'name:"\\xg"', 'name:"\\8"', 'name:"\\e"', 'name:"\\u00e9"', 'name:"\\u12"',
    'name:"\\U0001F600"', 'name:"\\U0010ffff"', 'name:"\\U0020ffff"', 'name:"\\U00110000"', 'name:"\\ud83d\\ude00"',
    'name:"\\U0001F6"', 'name:"\u00e9\u20ac\U0001f600"', 'name:"a" "b"', 'name:"a"\'b\'"c"', 'name:"a""b"',
    'name:"a"\n  "b" # c\n "d"', 'name:"a\nb"', 'name:"a', "name:'a\"", 'name:"a\\', 'name:"a\\\n"',
    'name:"tab\there"', 'name: a', 'name: 1', 'name "a"', 'name:{}', 'name:["a"]', 'name:', 'name:"x"priority:1',
    'priority:1name:"x"', 'priority:1 name:"x"', 'name:"a"#c', 'priority # c\n:\n# d\n1', 'priority:0', 'priority:-0',
    'priority:- 5', 'priority:-5', 'priority:--5', 'priority:+5', 'priority:010', 'priority:-010', 'priority:08',
    'priority:0x1F', 'priority:0X1f', 'priority:0x', 'priority:0xg', 'priority:-0x10', 'priority:00',
    'priority:2147483647', 'priority:2147483648', 'priority:-2147483648', 'priority:-2147483649',
    'priority:0x7fffffff', 'priority:0x80000000', 'priority:1.0', 'priority:1.', 'priority:1e3', 'priority:1f',
    'priority:true', 'priority:"1"', 'priority:1/2', 'priority:[1]', 'priority:1 2', 'priority:99999999999999999999',
    'time_limit_s:9223372036854775807', 'time_limit_s:9223372036854775808', 'time_limit_s:-9223372036854775808',
    'time_limit_s:-9223372036854775809', 'time_limit_s:0777777777777777777777', 'time_limit_s:0xffffffffffffffff',
    'optimizer{lr:1}', 'optimizer{lr:-1}', 'optimizer{lr:- 1.5}', 'optimizer{lr:1.}', 'optimizer{lr:.5}',
    'optimizer{lr:-.5}', 'optimizer{lr:.}', 'optimizer{lr:1e3}', 'optimizer{lr:1E+3}', 'optimizer{lr:1e-3}',
    'optimizer{lr:1e}', 'optimizer{lr:1e+}', 'optimizer{lr:1f}', 'optimizer{lr:1.5F}', 'optimizer{lr:1e3f}',
    'optimizer{lr:1ff}', 'optimizer{lr:1.5.3}', 'optimizer{lr:1..5}', 'optimizer{lr:0x10}', 'optimizer{lr:010}',
    'optimizer{lr:00.5}', 'optimizer{lr:0.5}', 'optimizer{lr:09}', 'optimizer{lr:0}', 'optimizer{lr:0f}',
    'optimizer{lr:-0}', 'optimizer{lr:inf}', 'optimizer{lr:-inf}', 'optimizer{lr:Inf}', 'optimizer{lr:INFINITY}',
    'optimizer{lr:infinit}', 'optimizer{lr:nan}', 'optimizer{lr:NaN}', 'optimizer{lr:-nan}', 'optimizer{lr:- inf}',
    'optimizer{lr:1e400}', 'optimizer{lr:1e-400}', 'optimizer{lr:4.9e-324}', 'optimizer{lr:18446744073709551615}',
    'optimizer{lr:18446744073709551616}', 'optimizer{lr:123456789012345678901234567890}', 'optimizer{lr:true}',
    'optimizer{lr:"1"}', 'optimizer{lr:+1}', 'optimizer{lr:0.1 beta1:.9}', 'optimizer{lr:9007199254740993}',
    'optimizer{lr:0.1000000000000000055511151231257827021181583404541015625}', 'model{tie_embeddings:true}',
    'model{tie_embeddings:True}', 'model{tie_embeddings:t}', 'model{tie_embeddings:TRUE}',
    'model{tie_embeddings:false}', 'model{tie_embeddings:False}', 'model{tie_embeddings:f}',
    'model{tie_embeddings:1}', 'model{tie_embeddings:0}', 'model{tie_embeddings:2}', 'model{tie_embeddings:-1}',
    'model{tie_embeddings:01}', 'model{tie_embeddings:0x1}', 'model{tie_embeddings:yes}',
    'model{tie_embeddings:"true"}', 'model{tie_embeddings:1.0}', 'model{factorization:COLA}',
    'model{factorization:2}', 'model{factorization:02}', 'model{factorization:9}', 'model{factorization:-1}',
    'model{factorization:cola}', 'model{factorization:"COLA"}', 'model{factorization:COLA,}',
    'model{factorization:99999999999}', 'model{factorization:2.0}', 'model{factorization:Value.COLA}',
    'model{factorization:AUTO}', 'model{mlp_activation:AUTO}', 'after:"a" after:"b"', 'after:[]', 'after:["a"]',
    'after:["a","b" "c"]', 'after:["a",]', 'after:[,"a"]', 'after:["a" , ]', 'after ["a"]',
    'after:["a"] after:"b" after:["c"]', 'after:["a";"b"]', 'after:["a"', 'after:["a"],', 'after:[["a"]]',
    'label{key:"a"}label{key:"b"}', 'label[{key:"a"},<value:"b">]', 'label:[{key:"a"}]', 'label:[]', 'label[]',
    'label:[{key:"a"}],label{value:"c"}', 'label:[{key:"a"},]', 'label:{key:"a"}', 'label:[key:"a"]', 'label:["a"]',
    'nmae:"a"', 'Name:"a"', 'NAME:"a"', '2:"a"', '[foo.bar]:1', '[foo.bar]{}', '"name":"a"', 'name="a"', 'name->"a"',
    'model.hidden:3', 'model{hidden:3 hidden:4}', 'model{hidden:3}hidden:4',
    'data{train{path:"a"}train{path:"b" weight:2}}',
    'data{train:[{path:"a"},{path:"b" weight:.5}] eval<path:"c"> seq_len:0x10}',
    'checkpoint{dir:"a" init_from{path:"b"}}', '\xef: 1', 'name:"a" \x7f', 'name:"a" \x01', '\ufeffname:"a"',
    'name:"a"\x0bpriority:1', 'name:"a"\x0cpriority:1', 'name:"a"\r\npriority:1\r\n', 'name:"a"@', '$', '@name:"a"',
    'model{hidden:1 # }\n}', 'name:"#x"#y', 'priority:5#', '#',
]

TYPE_CASES = [
    'i32:-2147483648 s32:-2147483648 sf32:-1 i64:-1 s64:-9223372036854775808 sf64:1', 'u32:4294967295 f32:1',
    'u32:4294967296', 'u32:-1', 'u32:-0', 'f32:-1', 'u64:18446744073709551615 f64:0xffffffffffffffff',
    'u64:18446744073709551616', 'u64:-1', 's32:2147483648', 's64:9223372036854775808', 'sf32:-2147483649',
    'u32:037777777777', 'u32:040000000000', 'real:0.1', 'real:1e39', 'real:-1e39', 'real:3.4028236e38',
    'real:3.4028235e38', 'real:1e-46', 'real:16777217', 'real:inf', 'real:nan', 'real:1f',
    'list_real:[1,2.5,-inf,.5f,-0.0]', 'list_i32:[1,-2,0x3,04]', 'list_i32:[1 2]', 'list_i32:1,list_i32:2',
    'choice:MINUS', 'choice:-3', 'choice:- 3', 'choice:-4', 'list_choice:[ONE,0,-3]', 'list_flag:[true,f,1,0]',
    'list_flag:[2]', 'raw:"\\000\\377\\xff"', 'raw:"\\777"', 'list_raw:["a","\\0"]', 'text:"\\303\\251"', 'raw:\'\'',
    'text:""', 'sub{sub{sub{i32:1}}}', 'sub<sub:{sub<i32:1>}>', 'list_sub{}list_sub{i32:1}',
    'list_sub:[{},<>,{sub{}}]', 'pick_number:1', 'pick_text:"a"', 'pick_sub{i32:1}', 'pick_number:1 pick_text:"a"',
    'pick_sub{} pick_number:0', 'pick_number:0 pick_number:1', 'flag:true,choice:ONE;text:"x"', 'text:"a\\000"',
]

# Refused here although protoc takes it, each for a reason given in proto/text.h.
STRICTER = {'name:"\\U00110000"', 'text:"a\\000"'}
# Read here although protoc refuses it: an editor's byte order mark.
LOOSER = {'\ufeffname:"a"'}

count = failed = 0

def check(ok, what, detail=""):
    global count, failed
    count += 1
    failed += not ok
    print(f"{'ok' if ok else 'not ok'} {count} - {what}")
    if not ok and detail:
        print("  # " + detail.replace("\n", "\n  # ")[:2000])

def run(argv, data):
    p = subprocess.run([str(a) for a in argv], input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    return p.returncode, p.stdout, p.stderr

class Schema:
    def __init__(self, message, include, proto):
        self.message, self.args = message, ["-I", str(include), str(proto)]

    def encode(self, text):
        return run(["protoc", f"--encode={self.message}", *self.args], text)

    def decode(self, data):
        return run(["protoc", f"--decode={self.message}", *self.args], data)

    def convert(self, source, target, data):
        return run([TOOL, "convert", self.message, source, target], data)

    def random(self, seed):
        return run([TOOL, "random", self.message, str(seed)], b"")[1]

def syntax(schema, cases):
    """Both accept with equal bytes, or both refuse."""
    bad = []
    for case in cases:
        text = case.encode()
        theirs, ours = schema.encode(text), schema.convert("text", "binary", text)
        if case in STRICTER:
            same = ours[0] == 1 and theirs[0] == 0
        elif case in LOOSER:
            same = ours[0] == 0 and theirs[0] != 0
        else:
            same = (theirs[0] == 0) == (ours[0] == 0) and (theirs[0] != 0 or theirs[1] == ours[1])
        if not same or ours[0] not in (0, 1):
            bad.append(f"{case!r}\n protoc {theirs[0]} {theirs[1].hex()} {theirs[2].decode(errors='replace')}"
                       f"\n ours   {ours[0]} {ours[1].hex()} {ours[2].decode(errors='replace')}")
    check(not bad, f"{schema.message}: {len(cases)} pieces of syntax as protoc reads them", "\n".join(bad))

def random_messages(schema, seeds):
    bad = []
    for seed in seeds:
        data = schema.random(seed)
        rc, text, err = schema.convert("binary", "text", data)
        back = schema.encode(text)
        if rc or back[0] or back[1] != data:
            bad.append(f"seed {seed}: protoc reads our text otherwise: {err.decode()} {back[2].decode(errors='replace')}")
        rc, text, err = schema.decode(data)
        back = schema.convert("text", "binary", text)
        if rc or back[0] or back[1] != data:
            bad.append(f"seed {seed}: we read protoc's text otherwise: {back[2].decode(errors='replace')}")
    check(not bad, f"{schema.message}: {len(seeds)} random messages both ways", "\n".join(bad))

def main():
    if not shutil.which("protoc"):
        print("1..1\nok 1 - text format against protoc # SKIP protoc is not installed (package protobuf-compiler)")
        return 0
    if not TOOL.exists():
        print(f"1..1\nnot ok 1 - {TOOL} is not built (make tests)")
        return 1
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp) / "all_types.proto"
        path.write_text(ALL_TYPES)
        job = Schema("boost.JobSpec", ROOT, ROOT / "proto/job.proto")
        every = Schema("AllTypes", tmp, path)
        syntax(job, JOB_CASES)
        syntax(every, TYPE_CASES)
        random_messages(job, range(60))
        random_messages(every, range(60))
        random_messages(Schema("boost.Request", ROOT, ROOT / "proto/rpc.proto"), range(15))
        random_messages(Schema("boost.ControllerMessage", ROOT, ROOT / "proto/agent.proto"), range(15))
    print(f"1..{count}")
    return 1 if failed else 0

sys.exit(main())
