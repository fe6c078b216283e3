// Runs given token ids through llama.cpp and times them: fills the sequence, then a prompt, then one token
// after another, as `tierkeep bench` does; then, with COUNT, the same once more, untimed, to count which
// experts were used. One line of JSON on standard output.
//
//   peer MODEL.gguf IDS FILL PROMPT DECODE THREADS REPACK(0|1) KV(f16|f32) WARMUP COUNT(0|1)
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

// Which experts each layer gave a token to.
using Experts = std::map<int, std::set<int32_t>>;

// Called before a tensor is computed (ask), to say whether its values are wanted, and after.
static bool note_experts(ggml_tensor * t, bool ask, void * data) {
    if (std::strncmp(t->name, "ffn_moe_topk-", 13) != 0) return !ask;
    if (ask) return true;
    std::vector<int32_t> row(t->ne[0]);
    for (int64_t at = 0; at < t->ne[1]; at++) {
        ggml_backend_tensor_get(t, row.data(), at * t->nb[1], row.size() * sizeof(int32_t));
        (*static_cast<Experts *>(data))[std::atoi(t->name + 13)].insert(row.begin(), row.end());
    }
    return true;
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Times {
    double fill = 0, prompt = 0;
    int best = -1;  // the most likely token after the prompt
    std::vector<double> steps;
};

// One sequence from its beginning; the tokens of each call of the decoder are positions after one another.
static bool run(llama_context * context, std::vector<llama_token> & ids, int fill, int prompt, int decode, Times & times) {
    llama_memory_clear(llama_get_memory(context), true);
    auto feed = [&](int from, int n) {
        const int most = (int) llama_n_batch(context);
        for (int at = from; at < from + n; at += most) {
            const int part = std::min(most, from + n - at);
            if (llama_decode(context, llama_batch_get_one(ids.data() + at, part)) != 0) return false;
        }
        llama_synchronize(context);
        return true;
    };
    double start = now();
    if (!feed(0, fill)) return false;
    times.fill = now() - start;
    start = now();
    if (!feed(fill, prompt)) return false;
    times.prompt = now() - start;
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    const float * logits = llama_get_logits_ith(context, -1);
    times.best = (int) (std::max_element(logits, logits + n_vocab) - logits);
    for (int at = 0; at < decode; at++) {
        start = now();
        if (!feed(fill + prompt + at, 1)) return false;
        times.steps.push_back(now() - start);
    }
    return true;
}

int main(int argc, char ** argv) {
    if (argc != 11) {
        std::fprintf(stderr, "peer MODEL IDS FILL PROMPT DECODE THREADS REPACK KV WARMUP COUNT\n");
        return 2;
    }
    const int fill = std::atoi(argv[3]), prompt = std::atoi(argv[4]), decode = std::atoi(argv[5]);
    const int threads = std::atoi(argv[6]), warm_up = std::atoi(argv[9]);
    std::vector<llama_token> ids;
    std::ifstream file(argv[2]);
    for (llama_token id; file >> id;) ids.push_back(id);
    if ((int) ids.size() < fill + prompt + decode) {
        std::fprintf(stderr, "too few token ids in %s\n", argv[2]);
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
    }, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    model_params.use_extra_bufts = std::atoi(argv[7]) != 0;
    const double loading = now();
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (model == nullptr) return 1;
    const double load = now() - loading;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = fill + prompt + decode + 8;
    params.n_batch = params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = threads;
    params.type_k = params.type_v = std::strcmp(argv[8], "f32") == 0 ? GGML_TYPE_F32 : GGML_TYPE_F16;
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) return 1;
    Times warm, times, unused;
    std::vector<llama_token> other(ids.rbegin(), ids.rend());
    if (!run(context, other, 0, prompt, warm_up, warm)) return 1;
    if (!run(context, ids, fill, prompt, decode, times)) return 1;
    llama_free(context);
    Experts experts;
    params.cb_eval = note_experts;
    params.cb_eval_user_data = &experts;
    context = llama_init_from_model(model, params);
    if (context == nullptr) return 1;
    if (std::atoi(argv[10]) != 0 && !run(context, ids, fill, prompt, decode, unused)) return 1;
    std::printf("{\"load_s\": %.4f, \"fill_s\": %.5f, \"prefill_s\": %.5f, \"steps_s\": [", load, times.fill, times.prompt);
    for (size_t at = 0; at < times.steps.size(); at++) std::printf("%s%.6f", at ? ", " : "", times.steps[at]);
    std::printf("], \"best\": %d, \"distinct\": [", times.best);
    bool first = true;
    for (const auto & layer : experts) {
        std::printf("%s%zu", first ? "" : ", ", layer.second.size());
        first = false;
    }
    std::printf("]}\n");
    llama_free(context);
    llama_model_free(model);
}
