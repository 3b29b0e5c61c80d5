# BOOST: build, test, demo. Everything made goes below $(BUILD).
#
#   make            binaries in build/bin, and what `make cuda` makes
#   make cuda       build/lib/boost-cuda.so, where the CUDA toolkit is (CUDA_ARCH=... what it is built for)
#   make demo       set up, build, train the example, kill a worker, see it recover
#   make test       set up, build, run every test
#   make test-full  the same, and the tests that take minutes
#   make soak       tests/soak: what takes an hour
#   make bench      benchmarks into build/bench.jsonl
#   make gpu-bundle build/boost-gpu-<commit>.tar.xz, to test on a machine with a GPU
#   make lint       house rules (tests/lint.sh), cppcheck where it is installed
#   make clean      remove build
#
# A room (folder) is a library; sources are found by folder, so a new file needs
# no line here. Dependencies between rooms are the L_* lists below.

BUILD ?= build
CC ?= gcc
CXX ?= g++
PROTOC_C ?= protoc-c
OPT ?= -O2 -g

WARN = -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
       -Wvla -Wformat=2 -Wno-format-truncation
WARNXX = -Wall -Wextra -Wshadow -Wpointer-arith -Wvla -Wformat=2
ifeq ($(CI),true)
WARN += -Werror
WARNXX += -Werror
endif

VERSION = 0.1.0
COMMIT := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)

CPPFLAGS += -D_GNU_SOURCE -I. -I$(BUILD)/gen
CFLAGS += -std=c17 $(OPT) -fno-strict-aliasing -pthread $(WARN)
CXXFLAGS += -std=c++17 $(OPT) -pthread $(WARNXX)
LDFLAGS += -pthread
# Libraries that travel with the programs (make gpu-bundle) are found first, those that they need too.
RPATH = -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/../lib:$$ORIGIN/../../lib'

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:

# ---- rooms -----------------------------------------------------------------

PROTOS := $(wildcard proto/*.proto)
GEN_C := $(PROTOS:%.proto=$(BUILD)/gen/%.pb-c.c)
GEN_O := $(GEN_C:%.c=%.o)

objs = $(patsubst %,$(BUILD)/obj/%.o,$(basename $(1)))
MAINS := daemon/boostd.c daemon/boost-agent.c daemon/boost-keeper.c worker/boost-worker.c ctl/boostctl.c
# Sources of boost-cuda.so that lie in the worker's folders.
CUDA_ROOT := worker/cuda_library.c $(wildcard worker/comm/nccl*.c)
sources = $(filter-out $(MAINS) $(CUDA_ROOT),$(foreach d,$(1),$(wildcard $(d)/*.c $(d)/*.cc)))

LIB = $(BUILD)/lib
$(LIB)/libproto.a:   $(GEN_O) $(call objs,$(call sources,proto proto/base))
$(LIB)/libplan.a:    $(call objs,$(call sources,worker/plan))
$(LIB)/libkernels.a: $(call objs,$(call sources,kernels kernels/cpu))
$(LIB)/libworker.a:  $(call objs,$(call sources,worker worker/comm))
$(LIB)/libstore.a:   $(call objs,$(call sources,store))
$(LIB)/libremote.a:  $(call objs,$(call sources,daemon/remote))
$(LIB)/libdaemon.a:  $(call objs,$(call sources,daemon))
$(LIB)/libctl.a:     $(call objs,$(call sources,ctl))

$(LIB)/%.a:
	@mkdir -p $(@D)
	@rm -f $@
	@$(AR) rcs $@ $^
	@echo "  AR   $@"

# What a program of each room links with, archives in dependency order.
L_PROTO   = $(LIB)/libproto.a
L_PLAN    = $(LIB)/libplan.a $(L_PROTO)
L_KERNELS = $(LIB)/libkernels.a $(L_PROTO)
L_WORKER  = $(LIB)/libworker.a $(LIB)/libkernels.a $(L_PLAN)
L_STORE   = $(LIB)/libstore.a $(L_PROTO)
L_REMOTE  = $(LIB)/libremote.a $(L_PROTO)
L_DAEMON  = $(LIB)/libdaemon.a $(LIB)/libremote.a $(LIB)/libstore.a $(L_PLAN)
L_CTL     = $(LIB)/libctl.a $(L_PLAN)

S_PROTO   = -lprotobuf-c -ljansson -lm
# LAPACK only where kernels/dense.h is used.
S_KERNELS = -ldnnl -lgomp -Wl,--as-needed -llapacke -Wl,--no-as-needed $(S_PROTO)
S_WORKER  = -lgloo -lstdc++ $(S_KERNELS)
S_STORE   = -lsqlite3 $(S_PROTO)
# Who uses proto/tls; --as-needed, so that boost-keeper does not load it.
S_TLS     = -Wl,--as-needed $(shell pkg-config --libs openssl 2>/dev/null || echo -lssl -lcrypto) -Wl,--no-as-needed
S_REMOTE  = -Wl,--as-needed -lcurl -Wl,--no-as-needed $(S_PROTO) $(S_TLS)
S_DAEMON  = -luv $(S_STORE) $(S_REMOTE)
S_CTL     = $(S_PROTO) $(S_TLS)

# ---- programs --------------------------------------------------------------

PROGRAMS := $(foreach m,$(wildcard $(MAINS)),$(BUILD)/bin/$(notdir $(basename $(m))))
all: $(PROGRAMS) cuda

$(BUILD)/bin/boostd:       $(call objs,daemon/boostd.c) $(L_DAEMON)
$(BUILD)/bin/boost-agent:  $(call objs,daemon/boost-agent.c) $(L_DAEMON)
$(BUILD)/bin/boost-keeper: $(call objs,daemon/boost-keeper.c) $(L_DAEMON)
$(BUILD)/bin/boost-worker: $(call objs,worker/boost-worker.c) $(L_WORKER)
$(BUILD)/bin/boostctl:     $(call objs,ctl/boostctl.c) $(L_CTL)

$(BUILD)/bin/boostd $(BUILD)/bin/boost-agent $(BUILD)/bin/boost-keeper: LIBS = $(S_DAEMON)
$(BUILD)/bin/boost-worker: LIBS = $(S_WORKER)
$(BUILD)/bin/boostctl: LIBS = $(S_CTL)

$(BUILD)/bin/%:
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) $(RPATH) -o $@ $^ $(LIBS)
	@echo "  LD   $@"

# ---- compiling -------------------------------------------------------------

.SECONDARY: $(GEN_C)
$(BUILD)/gen/%.pb-c.c: %.proto
	@mkdir -p $(@D)
	@$(PROTOC_C) --c_out=$(BUILD)/gen $<
	@echo "  GEN  $@"

$(BUILD)/gen/%.o: $(BUILD)/gen/%.c | $(GEN_C)
	@$(CC) $(CPPFLAGS) -std=c17 $(OPT) -c $< -o $@

$(BUILD)/obj/%.o: %.c | $(GEN_C)
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) $(CFLAGS) $(FILE_FLAGS) -MMD -MP -c $< -o $@
	@echo "  CC   $<"

$(BUILD)/obj/%.o: %.cc | $(GEN_C)
	@mkdir -p $(@D)
	@$(CXX) $(CPPFLAGS) $(CXXFLAGS) -MMD -MP -c $< -o $@
	@echo "  CXX  $<"

# The build id and version are in one object only, so that a commit does not rebuild all.
VERSION_O := $(BUILD)/obj/proto/version.o $(BUILD)/pic/proto/version.o
$(VERSION_O): FILE_FLAGS = -DBOOST_VERSION='"$(VERSION)"' -DBOOST_COMMIT='"$(COMMIT)"'
$(VERSION_O): $(BUILD)/commit
$(BUILD)/commit: FORCE
	@mkdir -p $(@D)
	@echo '$(COMMIT)' | cmp -s - $@ || echo '$(COMMIT)' > $@

# Element-wise and attention kernels are loops the compiler vectorises.
$(BUILD)/obj/kernels/cpu/%.o: OPT = -O3 -g
# The fp32 backend (and bf16 around it) shares OpenMP with oneDNN; what the last three allow is fused multiply-add, and no errno
# or trap from a vectorised sqrt or a masked comparison. None of them reorders a sum.
$(BUILD)/obj/kernels/cpu/fp32%.o $(BUILD)/obj/kernels/cpu/bf16%.o $(BUILD)/obj/kernels/cpu/bf16.o: FILE_FLAGS = -fopenmp -ffp-contract=fast -fno-math-errno -fno-trapping-math

# ---- CUDA ------------------------------------------------------------------

# boost-cuda.so is opened at run time, by a worker whose job runs on CUDA: programs need nothing of NVIDIA's.
# CUDA_ARCH: devices to compile for (sm_80 sm_90a ...); ptx_N: code that later devices translate when they load it.

NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
ifneq ($(NVCC),)
CUDA_DIR := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUDA_MAJOR := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\).*/\1/p')
CUDA_ARCH ?= $(if $(filter 8 9 10 11,$(CUDA_MAJOR)),sm_80,sm_90a)
CUDA_HEADERS := cublasLt.h nccl.h cudnn.h nvtx3/nvToolsExt.h
CUDA_INCLUDE := $(CUDA_DIR)/include $(NCCL_HOME:%=%/include) $(CUDNN_HOME:%=%/include)
CUDA_MISSING := $(strip $(foreach h,$(CUDA_HEADERS),$(if $(wildcard $(foreach d,$(CUDA_INCLUDE) /usr/include \
                /usr/include/x86_64-linux-gnu,$(d)/$(h))),,$(h))))
endif

# What the library takes from other rooms, linked where it is used; the build id is for who opens it.
CUDA_SHARED := $(call sources,proto/base) worker/comm/comm.c worker/comm/peers.c
CUDA_C := $(wildcard kernels/cuda/*.c $(CUDA_ROOT)) proto/version.c
CUDA_CU := $(wildcard kernels/cuda/*.cu)
pics = $(patsubst %,$(BUILD)/pic/%.o,$(basename $(1)))
CUDA_OBJECTS := $(call pics,$(CUDA_C)) $(CUDA_CU:%.cu=$(BUILD)/pic/%.cu.o)

GENCODE = $(foreach a,$(CUDA_ARCH),$(if $(filter ptx_%,$(a)),-gencode=arch=compute_$(a:ptx_%=%)$(comma)code=compute_$(a:ptx_%=%),\
          -gencode=arch=compute_$(a:sm_%=%)$(comma)code=$(a)))
comma := ,
NVCCFLAGS += -std=c++17 -O3 -lineinfo -Xcompiler -fPIC,-Wall,-Wextra $(if $(filter true,$(CI)),-Werror all-warnings)

.PHONY: cuda
cuda:
ifeq ($(NVCC),)
	@echo "CUDA toolkit not found (no nvcc on PATH, CUDA_HOME unset): building for the CPU only"
else ifneq ($(CUDA_MISSING),)
	@echo "CUDA toolkit found ($(NVCC)), but not $(CUDA_MISSING): building for the CPU only."
	@echo "  hint: install the development files of cuBLAS, NCCL and cuDNN, or set NCCL_HOME or CUDNN_HOME"
else
cuda: $(LIB)/boost-cuda.so
endif

$(LIB)/libcuda-shared.a: $(call pics,$(CUDA_SHARED))
# -Bsymbolic, and a list of what is seen from outside: the program that opens it has functions of the same names.
$(LIB)/boost-cuda.so: $(CUDA_OBJECTS) $(LIB)/libcuda-shared.a kernels/cuda/exports.map
	@$(CXX) -shared $(LDFLAGS) -Wl,-Bsymbolic -Wl,-z,defs -Wl,--version-script=kernels/cuda/exports.map -o $@ \
	    $(CUDA_OBJECTS) $(LIB)/libcuda-shared.a -L$(CUDA_DIR)/lib64 $(NCCL_HOME:%=-L%/lib) \
	    -lcublasLt -lnccl -l:libcudart_static.a -ldl -lrt -lm
	@echo "  LD   $@"

CUDA_CPPFLAGS = $(CUDA_INCLUDE:%=-isystem %)
$(BUILD)/pic/%.o: %.c | $(GEN_C)
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) $(CUDA_CPPFLAGS) $(CFLAGS) -fPIC $(FILE_FLAGS) -MMD -MP -c $< -o $@
	@echo "  CC   $< (PIC)"

$(BUILD)/pic/%.cu.o: %.cu $(BUILD)/cuda-arch
	@mkdir -p $(@D)
	@$(NVCC) $(NVCCFLAGS) $(GENCODE) -D_GNU_SOURCE -I. $(CUDA_CPPFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
	@echo "  NVCC $< ($(CUDA_ARCH))"
$(BUILD)/cuda-arch: FORCE
	@mkdir -p $(@D)
	@echo '$(CUDA_ARCH)' | cmp -s - $@ || echo '$(CUDA_ARCH)' > $@

# ---- tests -----------------------------------------------------------------
# tests/unit/<room>/*_test.c: one cmocka program each, linked with its room.

UNIT_SOURCES := $(wildcard tests/unit/*/*_test.c)
UNIT_TESTS := $(UNIT_SOURCES:tests/unit/%.c=$(BUILD)/tests/%)
TEST_SUPPORT := $(call objs,$(wildcard tests/unit/support/*.c))

define unit_room
$(filter $(BUILD)/tests/$(1)/%,$(UNIT_TESTS)): $(BUILD)/tests/$(1)/%: $(BUILD)/obj/tests/unit/$(1)/%.o $(TEST_SUPPORT) $(2)
	@mkdir -p $$(@D)
	@$$(CC) $$(LDFLAGS) $$(RPATH) -o $$@ $$^ -lcmocka $(3)
	@echo "  LD   $$@"
endef
$(eval $(call unit_room,proto,$(L_PROTO),$(S_PROTO) $(S_TLS)))
$(eval $(call unit_room,plan,$(L_PLAN),$(S_PROTO)))
$(eval $(call unit_room,kernels,$(L_KERNELS),$(S_KERNELS)))
$(eval $(call unit_room,worker,$(L_WORKER),$(S_WORKER)))
$(eval $(call unit_room,store,$(L_STORE),$(S_STORE)))
# These open what stands in for a library of NVIDIA.
$(BUILD)/tests/daemon/agent_gpu_test $(BUILD)/tests/daemon/agent_nvml_test: | $(BUILD)/tests/fakes/nvml.so
$(eval $(call unit_room,daemon,$(LIB)/libworld.a $(L_DAEMON),$(S_DAEMON)))
$(eval $(call unit_room,remote,$(L_REMOTE),$(S_REMOTE)))
$(eval $(call unit_room,ctl,$(L_CTL),$(S_CTL)))

# tests/fakes/*.c: shared libraries that stand in for those of a machine with GPUs, and for a bad network. boost-cuda.so:
# this build's id, and nothing behind it.
FAKES := $(BUILD)/tests/fakes/nvml.so $(BUILD)/tests/fakes/boost-cuda.so $(BUILD)/tests/fakes/lossy.so $(BUILD)/tests/fakes/faulty.so
$(BUILD)/tests/fakes/nvml.so: $(call pics,tests/fakes/nvml.c)
$(BUILD)/tests/fakes/lossy.so: $(call pics,tests/fakes/lossy.c)
$(BUILD)/tests/fakes/faulty.so: $(call pics,tests/fakes/faulty.c)
$(BUILD)/tests/fakes/boost-cuda.so: $(BUILD)/pic/proto/version.o
$(FAKES):
	@mkdir -p $(@D)
	@$(CC) -shared $(LDFLAGS) -o $@ $^
	@echo "  LD   $@"

# tests/world/*.c: the controller's core in a world of its own. tests/sim/*.c: the simulator of a cluster around it, a
# library too, so that tests/sim/mutants_test.py can link it with bugs that it plants.
$(LIB)/libworld.a: $(call objs,$(wildcard tests/world/*.c))
$(LIB)/libsim.a: $(call objs,$(wildcard tests/sim/*.c))
SIMULATOR := $(BUILD)/sim/simulator
$(SIMULATOR): $(LIB)/libsim.a $(LIB)/libworld.a $(L_DAEMON)
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) $(RPATH) -o $@ $^ $(S_DAEMON)
	@echo "  LD   $@"

# tests/issues/*_test.c: likewise, one for each reported failure, linked with the worker.
ISSUE_TESTS := $(patsubst tests/issues/%.c,$(BUILD)/tests/issues/%,$(wildcard tests/issues/*_test.c))
$(ISSUE_TESTS): $(BUILD)/tests/issues/%: $(BUILD)/obj/tests/issues/%.o $(L_WORKER)
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) $(RPATH) -o $@ $^ -lcmocka $(S_WORKER)
	@echo "  LD   $@"

# tests/gpu/*.c: programs for a machine with a GPU, linked with the worker; deploy/gpu-check.sh runs them.
GPU_PROGRAMS := $(patsubst tests/gpu/%.c,$(BUILD)/gpu/%,$(wildcard tests/gpu/*.c))
$(GPU_PROGRAMS): $(BUILD)/gpu/%: $(BUILD)/obj/tests/gpu/%.o $(TEST_SUPPORT) $(L_WORKER)
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) $(RPATH) -o $@ $^ -lcmocka $(S_WORKER)
	@echo "  LD   $@"

# tests/bench/*.c: one program each, for tests/bench/run.py and gpu_bench.py.
BENCHES := $(patsubst tests/bench/%.c,$(BUILD)/bench/%,$(wildcard tests/bench/*.c))
BENCH_SUPPORT := $(call objs,$(wildcard tests/bench/support/*.c))
# Headers of CUPTI, cuBLASLt and the CUDA backend's streams; without the toolkit the programs say what they cannot do.
$(addprefix $(BUILD)/obj/tests/bench/support/,trace.o op_times.o gemm_candidates.o): FILE_FLAGS = $(CUDA_DIR:%=-isystem %/include)
# The controller's and the agent's own; the others are of the worker.
$(BUILD)/bench/core_bench: $(BUILD)/obj/tests/bench/core_bench.o $(L_DAEMON)
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) $(RPATH) -o $@ $^ $(S_DAEMON)
	@echo "  LD   $@"
$(BUILD)/bench/mirror_bench: $(BUILD)/obj/tests/bench/mirror_bench.o $(L_REMOTE)
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) $(RPATH) -o $@ $^ $(S_REMOTE)
	@echo "  LD   $@"
$(filter-out $(addprefix $(BUILD)/bench/,core_bench mirror_bench),$(BENCHES)): $(BUILD)/bench/%: $(BUILD)/obj/tests/bench/%.o $(BENCH_SUPPORT) $(L_WORKER)
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) $(RPATH) -o $@ $^ $(S_WORKER) $(S_TLS)
	@echo "  LD   $@"

.PHONY: all setup tests test test-full test-system soak bench gpu-bundle demo lint clean FORCE
setup:
	@sh deploy/setup.sh
tests: $(addprefix $(BUILD)/bench/,mirror_bench comm_bench rank_bench)
tests: $(UNIT_TESTS) $(ISSUE_TESTS) $(FAKES) $(SIMULATOR) $(GPU_PROGRAMS)
test: setup
	@$(MAKE) --no-print-directory all tests
	@python3 tests/run.py --build $(BUILD)
test-full: setup
	@$(MAKE) --no-print-directory all tests
	@python3 tests/run.py --build $(BUILD) --full
soak: setup
	@$(MAKE) --no-print-directory all tests
	@python3 tests/run.py --build $(BUILD) --folder soak
# Wants root and network namespaces; without them its tests are skipped with the reason.
test-system: setup
	@$(MAKE) --no-print-directory all
	@python3 tests/run.py --build $(BUILD) --folder system
demo: setup
	@$(MAKE) --no-print-directory all
	@BUILD=$(BUILD) sh deploy/demo.sh
bench: setup
	@$(MAKE) --no-print-directory all $(BENCHES)
	@python3 tests/bench/run.py --build $(BUILD)
# One archive for a machine with a GPU and nothing of ours: programs, tests, the libraries they need.
gpu-bundle: setup
	@$(MAKE) --no-print-directory all tests $(BENCHES) CUDA_ARCH="sm_80 sm_90a ptx_80"
	@BUILD=$(BUILD) COMMIT=$(COMMIT) sh deploy/gpu-bundle.sh
lint:
	@sh tests/lint.sh
clean:
	rm -rf $(BUILD)

-include $(shell find $(BUILD)/obj $(BUILD)/pic -name '*.d' 2>/dev/null)
