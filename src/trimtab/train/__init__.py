"""Programs that train real models on real data, guarded and unguarded."""
